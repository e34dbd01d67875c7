"""The Ray actors; each adds only what Ray needs to objects of `dflash_ray`. Also here: where actors run, how their answers are awaited,
and the metrics for Ray's dashboard.

May import: dflash_ray.data.batches, dflash_ray.draft, dflash_ray.generation, dflash_ray.machine, dflash_ray.run, dflash_ray.transport.
"""
