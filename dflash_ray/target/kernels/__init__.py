"""The functions of `target/plain` for CUDA, with kernels from Triton, torch and flash-linear-attention. Imported only where a target is on
a GPU.

May import: dflash_ray.target.plain.
"""
