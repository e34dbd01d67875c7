"""What a forward pass of the first layers costs, counted: 2 FLOPs per parameter and real token, and causal attention.

Counted is what a token needs, whoever computes it: padding, recomputation, the chunked form of the delta rule and experts that a token does
not visit are not in it.
"""

from __future__ import annotations

import numpy as np

from dflash_ray.target.parameters import count_parameters
from dflash_ray.target.shape import TargetShape


def active_parameters(target_shape: TargetShape, layers: int) -> int:
    """Parameters of the first `layers` layers that one token passes; of experts, as many as it visits."""
    total = count_parameters(target_shape, layers) - target_shape.vocab_size * target_shape.hidden_size
    experts = target_shape.config.get("num_experts") or target_shape.config.get("num_local_experts")
    if not experts:
        return total
    dense = len([index for index in target_shape.config.get("mlp_only_layers") or [] if index < layers])
    idle = (
        (experts - target_shape.config["num_experts_per_tok"]) * 3 * target_shape.hidden_size * target_shape.config["moe_intermediate_size"]
    )
    return total - (layers - dense) * idle


def counted_flops(target_shape: TargetShape, layers: int, lengths: np.ndarray) -> float:
    """FLOPs of documents of `lengths` (int64 [D]) through the first `layers` layers."""
    lengths = lengths.astype(np.float64)
    window = target_shape.config.get("sliding_window") or np.inf
    pairs = {  # query-key pairs of a causal layer, half a square; with a window W the square's corner is missing
        "full_attention": (lengths**2 / 2).sum(),
        "sliding_attention": (lengths**2 / 2 - np.maximum(lengths - window, 0) ** 2 / 2).sum(),
        "linear_attention": 0.0,
    }
    attention = sum(
        4 * target_shape.num_attention_heads * target_shape.head_dim * pairs[kind] for kind in target_shape.layer_types[:layers]
    )
    return 2.0 * active_parameters(target_shape, layers) * lengths.sum() + attention
