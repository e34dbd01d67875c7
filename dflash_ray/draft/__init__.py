"""Trains a drafter: arriving features, losses, noise, optimizers, schedule, replay, and the trainer that uses them.

May import: dflash_ray, dflash_ray.config, dflash_ray.data, dflash_ray.data.batches, dflash_ray.draft.blocks, dflash_ray.draft.dflash,
dflash_ray.draft.kernels.
"""
