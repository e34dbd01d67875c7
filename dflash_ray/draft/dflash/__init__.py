"""The DFlash drafter: shape, forward and backward pass, memory and cost, export and load.

May import: dflash_ray, dflash_ray.config, dflash_ray.draft.blocks, dflash_ray.draft.kernels.
"""
