"""The memory-bound steps between matmuls, each one function.

Here they are plain torch, in `kernels.fused` the same functions are single kernels; `devices.fused_for` chooses. All take one packed
pass: T tokens of documents end to end, [T, ...], with `positions` int32 [T] counted from each document's start. Arithmetic is float32
whatever the dtype of the tensors, rounded once when it is stored.

With `fp8` a function returns `Quantised` rows for a matmul in 8 bits instead of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dflash_ray.target.plain import mixers
from dflash_ray.target.plain.mixers import DocumentBounds

E4M3_MAX = 448.0  # largest finite float8_e4m3fn


@dataclass(frozen=True)
class Quantised:
    """values float8_e4m3fn [T, N] and scale float32 [T, 1]; a row is values * scale."""

    values: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True)
class Fused:
    """The functions of this file, plain or as kernels."""

    rms_norm: Callable[..., torch.Tensor | Quantised]
    swiglu: Callable[..., torch.Tensor | Quantised]
    norm_rope: Callable[..., None]
    attention: Callable[..., torch.Tensor]
    gate_output: Callable[..., torch.Tensor | Quantised]
    conv_heads: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    decays: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    delta_rule: Callable[..., torch.Tensor]
    gated_norm: Callable[..., torch.Tensor | Quantised]
    kernels: dict[str, str]  # kind of mixer -> what mixes, for people


KERNELS = {"attention": "plain torch", "delta": "plain torch"}


def plain_fused() -> Fused:
    return Fused(rms_norm, swiglu, norm_rope, attention, gate_output, conv_heads, decays, delta_rule, gated_norm, KERNELS)


def quantise(x: torch.Tensor) -> Quantised:
    """Rows of x [T, N] scaled to the range of e4m3, one scale each."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / E4M3_MAX
    return Quantised((wide / scale).to(torch.float8_e4m3fn), scale)


def _stored(wide: torch.Tensor, dtype: torch.dtype, fp8: bool) -> torch.Tensor | Quantised:
    return quantise(wide) if fp8 else wide.to(dtype)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, add: torch.Tensor | None = None, fp8: bool = False
) -> torch.Tensor | Quantised:
    """x / rms(x) * weight of x [T, H], weight float32 [H]. `add` [T, H] is first added to x, in place."""
    if add is not None:
        x.copy_(x.float() + add.float())
    return _stored(F.rms_norm(x.float(), x.shape[-1:], weight, eps), x.dtype, fp8)


def swiglu(gate_up: torch.Tensor, *, fp8: bool = False) -> torch.Tensor | Quantised:
    """silu(gate) * up of gate_up [T, 2I], the gate first: [T, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return _stored(F.silu(gate) * up, gate_up.dtype, fp8)


def norm_rope(
    joined: torch.Tensor,
    heads: int,
    head_dim: int,
    weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Norm (where weight float32 [heads, D] is given) and rotation of the first `heads` heads of joined [T, W], in place.

    cos, sin: float32 [positions, D], sin negative in the first half; features i and i + D/2 turn together (`layers.rotary_order`).
    """
    part = joined[:, : heads * head_dim].unflatten(-1, (heads, head_dim))
    wide = part.float()
    if weight is not None:
        wide = F.rms_norm(wide, (head_dim,), None, eps) * weight
    at = positions.long()
    part.copy_(wide * cos[at].unsqueeze(1) + wide.roll(head_dim // 2, -1) * sin[at].unsqueeze(1))


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None, bounds: DocumentBounds
) -> torch.Tensor:
    """Causal attention inside each document, q [T, N, D], k and v [T, Nkv, D]: [T, N*D]."""
    return mixers.attention(q[None], k[None], v[None], scale=scale, window=window, bounds=bounds)[0].flatten(1)


def gate_output(mixed: torch.Tensor, gate: torch.Tensor | None, *, fp8: bool = False) -> torch.Tensor | Quantised:
    """mixed * sigmoid(gate), both [T, W]; mixed itself without a gate. May be done in place."""
    if gate is None:
        return quantise(mixed) if fp8 else mixed
    return _stored(mixed.float() * gate.float().sigmoid(), mixed.dtype, fp8)


def conv_heads(
    joined: torch.Tensor, weight: torch.Tensor, k_heads: int, k_dim: int, v_heads: int, v_dim: int, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Causal depthwise convolution and SiLU of the first C channels of joined [T, W] with weight [taps, C], cut into heads.

    Returns q and k [T, Nk, Dk], each head divided by sqrt(sum of squares + 1e-6), and v [T, Nv, Dv]. No document sees another.
    """
    taps, channels = weight.shape
    x, weight = joined[:, :channels].float(), weight.float()
    total = torch.zeros_like(x)
    for back in range(min(taps, len(x))):
        shifted = F.pad(x[: len(x) - back], (0, 0, back, 0))
        total += weight[taps - 1 - back] * shifted.masked_fill((positions < back)[:, None], 0)
    total = F.silu(total)
    keys = k_heads * k_dim
    qk = total[:, : 2 * keys].unflatten(-1, (2 * k_heads, k_dim))
    qk = (qk * torch.rsqrt(qk.square().sum(-1, keepdim=True) + 1e-6)).to(joined.dtype)
    return qk[:, :k_heads], qk[:, k_heads:], total[:, 2 * keys :].unflatten(-1, (v_heads, v_dim)).to(joined.dtype)


def decays(b: torch.Tensor, a: torch.Tensor, rate: torch.Tensor, dt_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """g = rate * softplus(a + dt_bias) and beta = sigmoid(b), float32 [T, Nv], from b and a [T, Nv]."""
    return rate * F.softplus(a.float() + dt_bias), b.float().sigmoid()


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *, bounds: DocumentBounds
) -> torch.Tensor:
    """Gated delta rule inside each document; q, k [T, Nk, Dk] of length 1, v [T, Nv, Dv], g and beta [T, Nv]: [T, Nv, Dv]."""
    return mixers.delta_rule(q[None], k[None], v[None], g[None], beta[None], bounds=bounds, unit=True)[0]


def gated_norm(mixed: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, *, fp8: bool = False) -> torch.Tensor | Quantised:
    """Each head of mixed [T, Nv, Dv] divided by its rms, times weight float32 [Dv], times silu(z) with z [T, Nv*Dv]: [T, Nv*Dv]."""
    normed = F.rms_norm(mixed.float(), mixed.shape[-1:], weight, eps).flatten(1)
    return _stored(normed * F.silu(z.float()), mixed.dtype, fp8)
