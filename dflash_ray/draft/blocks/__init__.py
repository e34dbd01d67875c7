"""What a block is: its anchor and slots, what they see, which of them have labels.

May import: dflash_ray.config, dflash_ray.data.batches.
"""
