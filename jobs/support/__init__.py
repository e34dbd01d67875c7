"""Code that several commands share: command lines, paths, checks before the start, the driver of a run.

May import: actors, actors.coordinator, dflash_ray, dflash_ray.config, dflash_ray.data.prepare, dflash_ray.doctor, dflash_ray.generation,
dflash_ray.machine, dflash_ray.planning, dflash_ray.run, dflash_ray.watch.
"""
