"""Triton kernels of the drafter's training pass. Imported only where a drafter trains on a CUDA device; `ops.plain` are their twins."""
