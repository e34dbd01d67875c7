"""The data of a run: `prepare` makes tokens from conversations, `store` keeps them on disk, `batches` makes numbered batches. `anchors.py`
chooses which tokens become anchors.

May import: dflash_ray.
"""
