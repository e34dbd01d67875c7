"""Lets the target answer prompts, and measures how much of a data set is the target's own text.

May import: dflash_ray, dflash_ray.data.batches, dflash_ray.data.prepare, dflash_ray.data.store, dflash_ray.machine, dflash_ray.serve,
dflash_ray.target.
"""
