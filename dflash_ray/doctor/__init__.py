"""Findings about the machine, the cluster, the target and the data, each with what to do.

May import: dflash_ray.draft.dflash, dflash_ray.machine, dflash_ray.planning, dflash_ray.run, dflash_ray.target.
"""
