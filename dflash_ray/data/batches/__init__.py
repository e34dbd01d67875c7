"""The batching strategies, the bucket edges, the plan of every epoch, and the numbered batches made from it.

May import: dflash_ray, dflash_ray.config, dflash_ray.data, dflash_ray.data.store.
"""
