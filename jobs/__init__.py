"""The commands of the project: each Python file directly in this folder is one, started as `python -m jobs.NAME`. The folders hold their
benchmarks, configs, quickstart and shared code.

May import: actors, dflash_ray, dflash_ray.config, dflash_ray.data, dflash_ray.data.batches, dflash_ray.data.prepare,
dflash_ray.data.store, dflash_ray.doctor, dflash_ray.draft, dflash_ray.draft.dflash, dflash_ray.generation, dflash_ray.planning,
dflash_ray.run, dflash_ray.serve, dflash_ray.target, dflash_ray.watch, dflash_ray.watch.report, jobs.support, jobs.support.tables.
"""
