"""The target's token mixers and fused steps in plain torch: what CPUs run, and what the kernels are compared with.

May import: nothing.
"""
