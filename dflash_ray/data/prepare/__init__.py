"""Turns files of conversations into tokens with a loss mask, and into prompts for the target.

May import: dflash_ray, dflash_ray.data.store.
"""
