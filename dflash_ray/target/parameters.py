"""How many parameters a target has, by arithmetic on its config: a dry run needs no torch and no transformers for it.

The counts are those of the family's own modules, which a test builds and compares. Keys that a config.json leaves out have the
family's own defaults.
"""

from __future__ import annotations

from dflash_ray.target.shape import TargetShape

# frequencies of these do not depend on the length, so one table serves every pass
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
HYBRID = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
HEAD_NORMS = ("qwen3", "qwen3_moe", *HYBRID)  # families that norm queries and keys
FAMILY_DEFAULTS = {
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
}
EXPERT_DEFAULTS = {"qwen3_moe": {"num_experts": 128, "moe_intermediate_size": 768}}
OTHER_EXPERTS = {"num_experts": 256, "moe_intermediate_size": 512}


def count_parameters(target_shape: TargetShape, layers: int) -> int:
    """Parameters of the first `layers` layers and the embedding. ValueError for layers that cannot be computed."""
    config = target_shape.config
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    refuse_unsupported(rope.get("rope_type") or rope.get("type") or "default", config.get("hidden_act", "silu"))
    return target_shape.vocab_size * target_shape.hidden_size + sum(_layer(target_shape, index) for index in range(layers))


def refuse_unsupported(rope: str, activation: str) -> None:
    """ValueError for a kind of rotary embedding or an activation that the layers do not have."""
    if rope not in STATIC_ROPE:
        raise ValueError(f"target.path: rope_type {rope!r} is not supported; supported are {', '.join(STATIC_ROPE)}")
    if activation not in ("silu", "swish"):
        raise ValueError(f"target.path: hidden_act {activation!r} is not supported; supported is silu")


def _layer(target_shape: TargetShape, index: int) -> int:
    linear = target_shape.layer_types[index] == "linear_attention"
    mixer = _delta_net(target_shape) if linear else _attention(target_shape)
    return 2 * target_shape.hidden_size + mixer + _mlp(target_shape, index)


def _attention(target_shape: TargetShape) -> int:
    family, hidden, head_dim = target_shape.model_type, target_shape.hidden_size, target_shape.head_dim
    queries, keys = target_shape.num_attention_heads * head_dim, target_shape.num_key_value_heads * head_dim
    gate = queries if family in HYBRID else 0
    inside = queries + gate + 2 * keys
    count = hidden * inside + queries * hidden
    if family == "qwen2":
        count += inside
    elif family != "mistral" and target_shape.config.get("attention_bias"):
        count += inside + hidden
    return count + (2 * head_dim if family in HEAD_NORMS else 0)


def _delta_net(target_shape: TargetShape) -> int:
    """Projections of queries, keys, values, gate z, b and a; the convolution; decay, time step and norm; the output's projection."""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    key_heads, value_heads, key_dim, value_dim, kernel = (_value(target_shape, f"linear_{name}") for name in names)
    mixed, values = 2 * key_heads * key_dim + value_heads * value_dim, value_heads * value_dim
    return target_shape.hidden_size * (mixed + 2 * values + 2 * value_heads) + mixed * kernel + 2 * value_heads + value_dim


def _mlp(target_shape: TargetShape, index: int) -> int:
    family, hidden, config = target_shape.model_type, target_shape.hidden_size, target_shape.config
    if family.startswith("qwen3_5_moe") or (family == "qwen3_moe" and _has_experts(target_shape, index)):
        experts = config.get("num_experts") or config.get("num_local_experts") or _value(target_shape, "num_experts")
        count = experts * (3 * _value(target_shape, "moe_intermediate_size") + 1) * hidden  # and the router's row
        shared = _value(target_shape, "shared_expert_intermediate_size") if family in HYBRID else None
        return count + (0 if shared is None else (3 * shared + 1) * hidden)
    inner = target_shape.intermediate_size
    return 3 * hidden * inner + (2 * inner + hidden if family == "llama" and config.get("mlp_bias") else 0)


def _has_experts(target_shape: TargetShape, index: int) -> bool:
    return (
        index not in (target_shape.config.get("mlp_only_layers") or []) and (index + 1) % _value(target_shape, "decoder_sparse_step") == 0
    )


def _value(target_shape: TargetShape, key: str) -> int:
    defaults = FAMILY_DEFAULTS | EXPERT_DEFAULTS.get(target_shape.model_type, OTHER_EXPERTS)
    value = target_shape.config.get(key)
    return defaults[key] if value is None else value
