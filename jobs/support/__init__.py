"""Code behind the commands: command lines, paths, checks before the start, starting or joining Ray, driving a run, the crews of generate
and quality, and the tables they print.

May import: actors, actors.coordinator, dflash_ray, dflash_ray.config, dflash_ray.data.prepare, dflash_ray.doctor, dflash_ray.generation,
dflash_ray.machine, dflash_ray.planning, dflash_ray.run, dflash_ray.watch.
"""
