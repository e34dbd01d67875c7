"""Decoding with and without a drafter, as servers do it, and the served tau.

May import: dflash_ray, dflash_ray.data.prepare, dflash_ray.draft.dflash, dflash_ray.target, dflash_ray.target.plain.
"""
