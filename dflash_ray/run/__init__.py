"""One run: its spec, its checks before the start, the objects built from it, the rehearsal of its largest batch, and its folder, records,
checkpoints and exports.

May import: dflash_ray, dflash_ray.config, dflash_ray.data.batches, dflash_ray.data.prepare, dflash_ray.data.store, dflash_ray.draft,
dflash_ray.draft.dflash, dflash_ray.target.
"""
