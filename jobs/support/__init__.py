"""What entry points share: command lines, the driver of a run, what they print.

May import: actors, actors.coordinator, dflash_ray, dflash_ray.config, dflash_ray.data.prepare, dflash_ray.doctor, dflash_ray.generation,
dflash_ray.machine, dflash_ray.planning, dflash_ray.run, dflash_ray.watch.
"""
