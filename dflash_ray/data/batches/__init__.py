"""Which samples form which batch, and the numbered batches themselves.

May import: dflash_ray, dflash_ray.config, dflash_ray.data, dflash_ray.data.store.
"""
