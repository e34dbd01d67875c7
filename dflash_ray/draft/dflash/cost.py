"""What a drafter's forward and backward pass costs, counted: no attention, no recomputation, nothing of the frozen target."""

from __future__ import annotations

import math

from dflash_ray.draft.dflash.shape import DraftShape


def flops_per_token(shape: DraftShape) -> float:
    """Of one context token: 6 x parameters of `fc` and of the layers' key and value projections."""
    sizes = _matrices(shape)
    return 6.0 * (sizes["fc.weight"] + sum(size for name, size in sizes.items() if "k_proj" in name or "v_proj" in name))


def flops_per_slot(shape: DraftShape) -> float:
    """Of one block slot through the layers: 6 x their parameters."""
    return 6.0 * sum(size for name, size in _matrices(shape).items() if name.startswith("layers."))


def flops_per_label(shape: DraftShape) -> float:
    """Of one label row through the frozen head: forward and the gradient of its input, 4 x hidden x vocabulary."""
    return 4.0 * shape.hidden * shape.vocab


def flops_per_anchor(shape: DraftShape) -> float:
    """Of one block whose labels are all supervised."""
    return shape.block_size * flops_per_slot(shape) + (shape.block_size - 1) * flops_per_label(shape)


def _matrices(shape: DraftShape) -> dict[str, float]:
    return {name: float(math.prod(size)) for name, size in shape.tensor_shapes().items() if len(size) == 2}
