"""What a forward pass of the first layers costs, counted: 2 FLOPs per parameter and real token, and causal attention.

Counted is what a token needs, whoever computes it: padding, recomputation, the chunked form of the delta rule and experts that a token does
not visit are not in it.
"""

from __future__ import annotations

import numpy as np

from dflash_ray.target.load import count_parameters
from dflash_ray.target.shape import TargetFacts


def active_parameters(facts: TargetFacts, layers: int) -> int:
    """Parameters of the first `layers` layers that one token passes; of experts, as many as it visits."""
    total = count_parameters(facts, layers) - facts.vocab_size * facts.hidden_size
    experts = facts.config.get("num_experts") or facts.config.get("num_local_experts")
    if not experts:
        return total
    dense = len([index for index in facts.config.get("mlp_only_layers") or [] if index < layers])
    idle = (experts - facts.config["num_experts_per_tok"]) * 3 * facts.hidden_size * facts.config["moe_intermediate_size"]
    return total - (layers - dense) * idle


def counted_flops(facts: TargetFacts, layers: int, lengths: np.ndarray) -> float:
    """FLOPs of documents of `lengths` (int64 [D]) through the first `layers` layers."""
    lengths = lengths.astype(np.float64)
    window = facts.config.get("sliding_window") or np.inf
    pairs = {  # query-key pairs of a causal layer, half a square; with a window W the square's corner is missing
        "full_attention": (lengths**2 / 2).sum(),
        "sliding_attention": (lengths**2 / 2 - np.maximum(lengths - window, 0) ** 2 / 2).sum(),
        "linear_attention": 0.0,
    }
    attention = sum(4 * facts.num_attention_heads * facts.head_dim * pairs[kind] for kind in facts.layer_types[:layers])
    return 2.0 * active_parameters(facts, layers) * lengths.sum() + attention
