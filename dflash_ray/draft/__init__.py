"""Training a drafter: losses, optimizers, schedule and the trainer that brings them together.

May import: dflash_ray, dflash_ray.config, dflash_ray.data, dflash_ray.data.batches, dflash_ray.draft.blocks, dflash_ray.draft.dflash,
dflash_ray.draft.kernels.
"""
