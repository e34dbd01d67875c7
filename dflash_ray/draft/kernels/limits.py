"""What the kernels of block attention take. No Triton here: plans and choosers ask on machines that have no GPU."""

from __future__ import annotations

import torch

TILE = 128  # rows of the kernels' tiles: slots of a block times query heads per key head must fit


def kernels_take(dtype: torch.dtype, head_dim: int, rows: int) -> bool:
    """May the GPU kernels compute this? They are for bf16, heads of 16 to 128 values (a power of two), and `rows` up to TILE."""
    return dtype == torch.bfloat16 and 16 <= head_dim <= 128 and head_dim & (head_dim - 1) == 0 and rows <= TILE
