"""What commands print as tables.

May import: dflash_ray.data.prepare, dflash_ray.data.store, dflash_ray.planning.
"""
