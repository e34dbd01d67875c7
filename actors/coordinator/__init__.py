"""The coordinator and its parts: what starts, feeds, heals and measures the other actors.

May import: actors, dflash_ray, dflash_ray.data.batches, dflash_ray.machine, dflash_ray.pipeline, dflash_ray.run, dflash_ray.transport,
dflash_ray.watch.
"""
