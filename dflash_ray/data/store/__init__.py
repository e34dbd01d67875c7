"""Data sets on disk: written once, read by sample number.

May import: dflash_ray, dflash_ray.data.
"""
