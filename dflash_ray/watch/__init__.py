"""What a run tells while it works: metrics, the console line, power, tracking, pictures.

May import: dflash_ray, dflash_ray.config, dflash_ray.data.batches, dflash_ray.run.
"""
