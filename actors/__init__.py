"""Ray actors: thin shells round library objects, one file each.

May import: dflash_ray.data.batches, dflash_ray.draft, dflash_ray.generation, dflash_ray.machine, dflash_ray.run, dflash_ray.transport.
"""
