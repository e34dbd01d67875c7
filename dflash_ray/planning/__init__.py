"""What to find out before a long run: memory of every actor, how many targets feed one drafter, how fast each part is, which training
recipe is best.

May import: dflash_ray, dflash_ray.config, dflash_ray.data.batches, dflash_ray.data.store, dflash_ray.draft.dflash, dflash_ray.run,
dflash_ray.target, dflash_ray.watch.
"""
