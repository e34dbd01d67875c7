"""What this process, this host and its GPUs are.

May import: nothing.
"""
