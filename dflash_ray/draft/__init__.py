"""The training of a drafter: the trainer, and the features, frozen head, losses, noise, optimizers, schedule and replay it uses. The model
is in `dflash`, block slots in `blocks`, Triton kernels in `kernels`.

May import: dflash_ray, dflash_ray.config, dflash_ray.data, dflash_ray.data.batches, dflash_ray.draft.blocks, dflash_ray.draft.dflash,
dflash_ray.draft.kernels.
"""
