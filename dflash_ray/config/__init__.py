"""Every setting of a run with its default, and how files and flags become one checked tree; loads neither torch nor ray.

May import: nothing.
"""
