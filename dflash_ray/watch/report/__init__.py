"""One HTML page of one or several runs.

May import: dflash_ray, dflash_ray.run.
"""
