"""The drafter's Triton kernels; imported only where a drafter trains on a GPU. `limits` says what they take and imports no Triton.

May import: dflash_ray.config, dflash_ray.draft.blocks.
"""
