"""One run: what it is made of, what is checked before it starts, and its folder, records and checkpoints.

May import: dflash_ray, dflash_ray.config, dflash_ray.data.batches, dflash_ray.data.prepare, dflash_ray.data.store, dflash_ray.draft,
dflash_ray.draft.dflash, dflash_ray.target.
"""
