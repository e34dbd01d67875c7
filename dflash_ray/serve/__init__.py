"""Decodes text with and without a drafter, as a server does, and measures served tau: tokens gained per pass of the target.

May import: dflash_ray, dflash_ray.data.prepare, dflash_ray.draft.dflash, dflash_ray.target, dflash_ray.target.plain.
"""
