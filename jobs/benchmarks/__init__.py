"""The benchmarks that `python -m jobs.bench PART` starts: the flags of each part, its measurements in `measure_PART.py`, and what they
share.

May import: actors, actors.coordinator, dflash_ray.config, dflash_ray.data.batches, dflash_ray.data.store, dflash_ray.draft,
dflash_ray.draft.blocks, dflash_ray.draft.dflash, dflash_ray.machine, dflash_ray.pipeline, dflash_ray.planning, dflash_ray.run,
dflash_ray.target, dflash_ray.transport, jobs.support.
"""
