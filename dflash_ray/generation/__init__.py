"""The target's own answers to prompts, and whether a data set holds such answers.

May import: dflash_ray, dflash_ray.data.batches, dflash_ray.data.prepare, dflash_ray.data.store, dflash_ray.machine, dflash_ray.serve,
dflash_ray.target.
"""
