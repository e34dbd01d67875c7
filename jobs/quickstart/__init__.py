"""The quickstart: its target, its conversations, its run, and the code that made the target and the conversations.

May import: dflash_ray, dflash_ray.config, dflash_ray.data.prepare, dflash_ray.run, dflash_ray.serve, dflash_ray.target, dflash_ray.watch,
jobs, jobs.quickstart.prompts, jobs.support.
"""
