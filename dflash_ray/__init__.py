"""The library of dflash-ray: everything that makes sense without Ray. Nothing in here imports ray."""
