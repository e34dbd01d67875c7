"""How features travel from a target to the drafter: through the object store, or directly between GPUs.

May import: nothing.
"""
