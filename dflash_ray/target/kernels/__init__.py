"""The same functions on CUDA: Triton, torch's and flash-linear-attention's kernels; imported only where a target is on a GPU.

May import: dflash_ray.target.plain.
"""
