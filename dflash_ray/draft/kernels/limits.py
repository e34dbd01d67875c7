"""What the kernels of block attention take. No Triton and no torch here: plans and choosers ask on machines that have no GPU."""

from __future__ import annotations

TILE = 128  # rows of the kernels' tiles: slots of a block times query heads per key head must fit


def sizes_fit(head_dim: int, rows: int) -> bool:
    """May the kernels compute heads of `head_dim` values, 16 to 128 and a power of two, and `rows` up to TILE? They are for bf16."""
    return 16 <= head_dim <= 128 and head_dim & (head_dim - 1) == 0 and rows <= TILE
