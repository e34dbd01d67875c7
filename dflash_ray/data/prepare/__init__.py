"""From files of conversations to tokens with a loss mask.

May import: dflash_ray, dflash_ray.data.store.
"""
