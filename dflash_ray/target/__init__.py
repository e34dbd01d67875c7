"""The frozen target: its shape and weights from a folder, and the forward pass that yields features.

May import: dflash_ray, dflash_ray.data.batches, dflash_ray.target.kernels, dflash_ray.target.plain.
"""
