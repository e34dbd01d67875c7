"""The slots of a block: what each slot may see, which slots have a label, and what the label weighs.

May import: dflash_ray.config, dflash_ray.data.batches.
"""
