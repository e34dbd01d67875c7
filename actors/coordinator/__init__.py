"""The coordinator and its parts: they start the other actors, give them work, restart the dead ones and measure the run.

May import: actors, dflash_ray, dflash_ray.data.batches, dflash_ray.machine, dflash_ray.pipeline, dflash_ray.run, dflash_ray.transport,
dflash_ray.watch.
"""
