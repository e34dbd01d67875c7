"""The frozen target: its shape and weights from a folder, the forward pass that yields features, its cost, and the self-test of the fast
path.

May import: dflash_ray, dflash_ray.data.batches, dflash_ray.target.kernels, dflash_ray.target.plain.
"""
