"""The checks of `jobs.doctor`: of the machine, of Ray, and of one run (target, data, room on disk, in /dev/shm and on the GPUs). Each
finding says what to do.

May import: dflash_ray.draft.dflash, dflash_ray.machine, dflash_ray.planning, dflash_ray.run, dflash_ray.target.
"""
