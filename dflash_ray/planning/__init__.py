"""Before GPU-days are spent: memory, number of targets, benchmarks, recipes compared.

May import: dflash_ray, dflash_ray.config, dflash_ray.data.batches, dflash_ray.data.store, dflash_ray.draft.dflash, dflash_ray.run,
dflash_ray.target, dflash_ray.watch.
"""
