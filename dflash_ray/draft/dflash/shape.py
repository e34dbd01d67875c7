"""The drafter's shape: every size it needs, resolved once from the config and the target, then never guessed again.

A shape that exists is a shape that servers can run: heads divide, taps are ascending and never on the target's last layer, the mask
token has an embedding and is no pad or end token, and the base of the rotary positions is the target's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from dflash_ray.config.schema import DraftConfig
from dflash_ray.draft.kernels.limits import sizes_fit

FULL, SLIDING = "full_attention", "sliding_attention"


class TargetSizes(Protocol):
    """What the drafter takes over from the text part of the target's config."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_layers: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int


@dataclass(frozen=True)
class DraftShape:
    """ValueError, naming the key and what would be right, for a shape that no server could run."""

    hidden: int
    vocab: int
    intermediate: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_types", tuple(self.layer_types))
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        if SLIDING not in self.layer_types:
            object.__setattr__(self, "sliding_window", None)  # nothing uses it, so two shapes that differ in it alone are equal
        for name in ("hidden", "vocab", "intermediate", "num_layers", "heads", "kv_heads", "head_dim", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"draft: {name} is {getattr(self, name)}; it must be at least 1")
        if self.block_size < 2:
            raise ValueError(f"draft.block_size: {self.block_size} leaves no slot to predict; use at least 2")
        if self.block_size > self.max_position_embeddings:
            raise ValueError(f"draft.block_size: {self.block_size} is more than the target's {self.max_position_embeddings} positions")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"draft.num_key_value_heads: {self.kv_heads} does not divide num_attention_heads {self.heads}; "
                f"use one of {_divisors(self.heads)}"
            )
        if self.head_dim % 2:
            raise ValueError(f"draft.head_dim: {self.head_dim} is odd; rotary positions turn pairs, use an even number")
        if not self.rope_theta or self.rope_theta <= 0:
            raise ValueError(f"draft: rope_theta is {self.rope_theta}; the target's config must give it, there is no default")
        if not self.rms_norm_eps > 0:
            raise ValueError(f"draft: rms_norm_eps is {self.rms_norm_eps}; it must be above 0")
        self._check_layers()
        _check_taps(self.target_layer_ids, self.num_target_layers)
        if not 0 <= self.mask_token_id < self.vocab:
            raise ValueError(f"draft.mask_token_id: {self.mask_token_id} has no embedding; the target has ids 0..{self.vocab - 1}")

    def _check_layers(self) -> None:
        if len(self.layer_types) != self.num_layers:
            raise ValueError(f"draft.layer_types: {len(self.layer_types)} entries for {self.num_layers} layers; give one per layer")
        for kind in self.layer_types:
            if kind not in (FULL, SLIDING):
                raise ValueError(f"draft.layer_types: {kind!r} is neither {FULL} nor {SLIDING}")
        if SLIDING in self.layer_types and (self.sliding_window is None or self.sliding_window < 1):
            raise ValueError(f"draft.sliding_window: {self.sliding_window} for a {SLIDING} layer; set it to at least 1, for instance 2048")

    @property
    def features(self) -> int:
        """Width of the received features: taps x hidden."""
        return len(self.target_layer_ids) * self.hidden

    @property
    def fits_kernels(self) -> bool:
        """Do the GPU's kernels, which are for bf16, take heads and blocks of this size?"""
        return sizes_fit(self.head_dim, self.block_size * self.heads // self.kv_heads)

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer; None for full attention."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every parameter: 3 + 11 per layer, the set that servers read (`export`)."""
        hidden, queries, keys = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (self.head_dim,),
            "self_attn.k_norm": (self.head_dim,),
            "mlp.gate_proj": (self.intermediate, hidden),
            "mlp.up_proj": (self.intermediate, hidden),
            "mlp.down_proj": (hidden, self.intermediate),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, self.features),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        for index in range(self.num_layers):
            shapes |= {f"layers.{index}.{name}.weight": size for name, size in layer.items()}
        return shapes

    @property
    def layer_parameters(self) -> int:
        """Parameters of one draft layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (2 * queries + 2 * keys + 3 * self.intermediate + 2) + 2 * self.head_dim

    @property
    def parameters(self) -> int:
        """Trainable parameters: fc, two norms and the layers; 1.730 B for the Qwen3.6-27B drafter."""
        return self.hidden * (self.features + 2) + self.num_layers * self.layer_parameters

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON-able values; `DraftShape(**d)` gives an equal shape."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def resolve_shape(
    draft: DraftConfig, target: TargetSizes, *, tokenizer_mask_id: int | None = None, reserved: Mapping[str, int] | None = None
) -> DraftShape:
    """The shape that config and target give (defaults: `DraftConfig`).

    `tokenizer_mask_id` is the target tokenizer's own mask token, used where `draft.mask_token_id` is not set. `reserved` names token ids
    that must not be the mask token, for instance `{"pad": 0, "eos": 2}`.
    """
    wide = target.hidden_size >= 2048
    head_dim = draft.head_dim or (128 if wide else 64)
    heads = draft.num_attention_heads or max(1, target.hidden_size // (128 if wide else 64))
    mask = draft.mask_token_id if draft.mask_token_id is not None else tokenizer_mask_id
    if mask is None:
        raise ValueError(
            "draft.mask_token_id: not set and the target's tokenizer has no mask token; give an unused id that has an embedding row"
        )
    for name, token in (reserved or {}).items():
        if token == mask:
            raise ValueError(f"draft.mask_token_id: {mask} is the target's {name} token; give an id that never occurs in text")
    return DraftShape(
        hidden=target.hidden_size,
        vocab=target.vocab_size,
        intermediate=draft.intermediate_size or target.intermediate_size,
        num_layers=draft.num_layers,
        heads=heads,
        kv_heads=draft.num_key_value_heads or _nearest_divisor(heads, heads / 4),
        head_dim=head_dim,
        layer_types=tuple(draft.layer_types or [FULL] * draft.num_layers),
        sliding_window=draft.sliding_window,
        block_size=draft.block_size,
        mask_token_id=mask,
        target_layer_ids=resolve_taps(draft, target.num_layers),
        num_target_layers=target.num_layers,
        rope_theta=target.rope_theta,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
    )


def resolve_taps(draft: DraftConfig, layers: int) -> tuple[int, ...]:
    """`draft.target_layer_ids`, or by rule `round(1 + i (n-4)/(L-1))` with Python's round, n // 2 for one tap (dflash.md, forward pass)."""
    if draft.target_layer_ids != "auto":
        return tuple(draft.target_layer_ids)
    count = draft.num_taps
    taps = (layers // 2,) if count == 1 else tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))
    if len(set(taps)) < count or taps[0] > taps[-1]:
        raise ValueError(
            f"draft.num_taps: {count} taps by rule repeat layers of a {layers}-layer target ({list(taps)}); "
            f"use at most {max(1, layers - 3)}, or name them in draft.target_layer_ids"
        )
    return taps


def _check_taps(taps: tuple[int, ...], layers: int) -> None:
    key = "draft.target_layer_ids"
    if not taps:
        raise ValueError(f"{key}: empty; name at least one of 0..{layers - 2}")
    for tap in taps:
        if tap == layers - 1:
            raise ValueError(
                f"{key}: {tap} is the last layer of a {layers}-layer target; servers read taps before each layer. Use ids 0..{layers - 2}."
            )
        if not 0 <= tap < layers:
            raise ValueError(f"{key}: the target has {layers} layers, there is no layer {tap}; use ids 0..{layers - 2}")
    if any(a >= b for a, b in zip(taps, taps[1:], strict=False)):
        raise ValueError(f"{key}: {list(taps)} must rise without repeats; servers collect taps in layer order")


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _nearest_divisor(number: int, wanted: float) -> int:
    return min(_divisors(number), key=lambda d: (abs(d - wanted), d))
