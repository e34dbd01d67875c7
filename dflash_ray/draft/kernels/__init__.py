"""The drafter's Triton kernels; imported only where a drafter trains on a GPU.

May import: dflash_ray.config, dflash_ray.draft.blocks.
"""
