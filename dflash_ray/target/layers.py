"""Decoder layers of the frozen target, reduced to what a forward pass needs.

A transformers layer is taken apart once, at load: its projections are joined into one matrix each (one matmul instead of three to
five), its norms and MoE blocks are kept. Every mixer is `project` -> mixing -> `finish`, so that the packed pass, the padded pass and
cached decoding differ in the middle only. Tensors are [B, T, ...]; a packed batch is B = 1.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from dflash_ray.linear import FrozenLinear
from dflash_ray.target.plain.mixers import DocumentBounds, Mixers


class RmsNorm:
    """x / rms(x) * weight in float32, returned in x's dtype.

    What a module stores is measured, not assumed: some families store the weight, others the weight - 1. Whichever reproduces the module's
    own output is taken; a module that follows neither is refused.
    """

    def __init__(self, module: nn.Module, eps: float) -> None:
        probe_module = copy.deepcopy(module).float().cpu()
        stored = probe_module.weight.detach()
        probe = torch.linspace(-2.0, 3.0, stored.numel()).reshape(1, -1)
        expected = probe_module(probe).detach()
        for weight in (stored, 1.0 + stored):
            if torch.allclose(F.rms_norm(probe, (stored.numel(),), weight, eps), expected, rtol=1e-4, atol=1e-5):
                self.weight = weight.to(module.weight.device)
                self.eps = eps
                self.shape = (stored.numel(),)
                return
        raise ValueError(f"target.path: {type(module).__name__} is not x / rms(x) times weight or 1 + weight; this family is not supported")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.shape, self.weight, self.eps).to(x.dtype)


@dataclass(frozen=True)
class Rotation:
    """Rotary factors of the tokens of one pass, float32, each broadcastable to [B, T, N, D]: features i and i + D/2 turn together.

    `sin` is negative in the first half. Pairs that do not rotate have cos 1 and sin 0.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., N, D] in the order of `rotary_order`, rotated in float32."""
        wide = x.float()
        return torch.addcmul(wide * self.cos, wide.roll(wide.shape[-1] // 2, -1), self.sin).to(x.dtype)


class RotaryTable:
    """cos and signed sin float32 [at least length, D] of positions 0, 1, ..., from the family's own rotary module; grown as needed."""

    def __init__(self, rotary: nn.Module, head_dim: int, device: torch.device) -> None:
        self._rotary, self._head_dim, self._device = rotary, head_dim, device
        self._table = (torch.empty(0), torch.empty(0))

    def __call__(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        if length > self._table[0].shape[0]:
            size = max(2 * self._table[0].shape[0], length, 256)
            positions = torch.arange(size)[None]
            if hasattr(self._rotary, "mrope_section"):  # time, height and width of a token: for text all three are its position
                positions = positions.expand(3, 1, size)
            # the module casts to the dtype of its first argument
            cos, sin = self._rotary(torch.empty(1, dtype=torch.float32), positions)
            half = cos.shape[-1] // 2
            still = (0, self._head_dim // 2 - half)
            cos, sin = F.pad(cos[0, :, :half], still, value=1.0), F.pad(sin[0, :, :half], still, value=0.0)
            self._table = (torch.cat((cos, cos), -1).to(self._device), torch.cat((-sin, sin), -1).to(self._device))
        return self._table


def rotary_order(head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Order of a head's features that pairs i with i + D/2 for the whole head.

    A partly rotating head is [first half of R | second half of R | rest]; the rest is split over both halves. The same order on
    queries and keys leaves their products unchanged, and no pass has to cut the head and join it again.
    """
    order = torch.arange(head_dim)
    half, rest = rotary_dim // 2, (head_dim - rotary_dim) // 2
    first, second, still = order[:half], order[half:rotary_dim], order[rotary_dim:]
    return torch.cat((first, still[:rest], second, still[rest:]))


class Attention:
    """Grouped-query attention, with q/k norms and an output gate where the family has them."""

    kind = "attention"

    def __init__(self, module: nn.Module, *, heads: int, kv_heads: int, rotary_dim: int, window: int | None, eps: float) -> None:
        self.heads, self.kv_heads, self.window = heads, kv_heads, window
        self.head_dim = module.head_dim
        self.scale = module.scaling
        self.gated = module.q_proj.weight.shape[0] == 2 * heads * self.head_dim
        order = rotary_order(self.head_dim, rotary_dim).to(module.q_proj.weight.device)

        def rows(name: str) -> list[torch.Tensor]:
            """Per projection: rows as [heads, D, ...], so that heads can be reordered and joined."""
            tensor = getattr(module.q_proj, name)
            q = tensor.view(heads, -1, *tensor.shape[1:])
            k = getattr(module.k_proj, name).view(kv_heads, -1, *tensor.shape[1:])
            v = getattr(module.v_proj, name).view(kv_heads, -1, *tensor.shape[1:])
            parts = [q[:, : self.head_dim][:, order], k[:, order], v]
            return parts + ([q[:, self.head_dim :]] if self.gated else [])

        bias = None if module.q_proj.bias is None else torch.cat([part.flatten() for part in rows("bias")])
        self.in_proj = FrozenLinear(torch.cat([part.flatten(0, 1) for part in rows("weight")]), bias)
        self.out_proj = FrozenLinear(module.o_proj.weight, module.o_proj.bias)
        self.eps = eps
        self.qk_weight = None
        if hasattr(module, "q_norm"):
            norms = (module.q_norm, heads), (module.k_norm, kv_heads)
            self.qk_weight = torch.cat([RmsNorm(norm, eps).weight[order].expand(n, -1) for norm, n in norms])  # [N + Nkv, D]

    def project(self, x: torch.Tensor, rotate: Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """x [...,H] -> rotated q [...,N,D] and k [...,Nkv,D], v [...,Nkv,D], and the gate [...,N*D] or None."""
        joined = self.in_proj(x).view(*x.shape[:-1], -1, self.head_dim)
        n, m = self.heads, self.kv_heads
        qk = joined[..., : n + m, :]
        if self.qk_weight is not None:
            qk = (F.rms_norm(qk.float(), (self.head_dim,), None, self.eps) * self.qk_weight).to(x.dtype)
        qk = rotate(qk)
        gate = joined[..., n + 2 * m :, :].flatten(-2) if self.gated else None
        return qk[..., :n, :], qk[..., n:, :], joined[..., n + m : n + 2 * m, :], gate

    def finish(self, mixed: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        """mixed [...,N,D] -> [...,H]."""
        mixed = mixed.flatten(-2)
        if gate is not None:
            mixed = mixed * gate.sigmoid()
        return self.out_proj(mixed)

    def __call__(self, x: torch.Tensor, rotate: Rotation, bounds: DocumentBounds, mixers: Mixers) -> torch.Tensor:
        q, k, v, gate = self.project(x, rotate)
        return self.finish(mixers.attention(q, k, v, scale=self.scale, window=self.window, bounds=bounds), gate)


class GatedDeltaNet:
    """Short convolution, gated delta rule, gated norm (Qwen3.5 and later)."""

    kind = "delta"

    def __init__(self, module: nn.Module) -> None:
        self.k_heads, self.v_heads = module.num_k_heads, module.num_v_heads
        self.k_dim, self.v_dim = module.head_k_dim, module.head_v_dim
        self.conv_dim = module.conv_dim
        parts = (module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a)
        self.in_proj = FrozenLinear(torch.cat([part.weight for part in parts]))
        self.sizes = [part.weight.shape[0] for part in parts]
        self.w_conv = module.conv1d.weight.squeeze(1)  # [C, W]
        # float32: in 16 bits exp(A_log) would move every decay
        self.rate = -module.A_log.float().exp()
        self.dt_bias = module.dt_bias.float()
        self.norm_weight, self.norm_eps = module.norm.weight.float(), module.norm.variance_epsilon
        self.out_proj = FrozenLinear(module.out_proj.weight)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [...,H] -> input of the convolution [...,C], output gate z [...,Nv*Dv], g and beta float32 [...,Nv]."""
        mixed, z, b, a = self.in_proj(x).split(self.sizes, dim=-1)
        return mixed, z, self.rate * F.softplus(a.float() + self.dt_bias), b.float().sigmoid()

    def heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output of the convolution [B,T,C] -> queries beside keys [B,T,2*Nk,Dk], v [B,T,Nv,Dv]."""
        qk, v = mixed.split((2 * self.k_heads * self.k_dim, self.v_heads * self.v_dim), -1)
        return qk.unflatten(-1, (2 * self.k_heads, self.k_dim)), v.unflatten(-1, (self.v_heads, self.v_dim))

    def finish(self, mixed: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """mixed [...,Nv,Dv] -> [...,H]."""
        normed = F.rms_norm(mixed.float(), (self.v_dim,), self.norm_weight, self.norm_eps)
        gated = normed.flatten(-2) * F.silu(z.float())
        return self.out_proj(gated.to(z.dtype))

    def __call__(self, x: torch.Tensor, rotate: Rotation, bounds: DocumentBounds, mixers: Mixers) -> torch.Tensor:
        mixed, z, g, beta = self.project(x)
        qk, v = self.heads(mixers.short_conv(mixed, self.w_conv, bounds=bounds))
        q, k = qk.chunk(2, 2)
        return self.finish(mixers.delta_rule(q, k, v, g, beta, bounds=bounds), z)


class Mlp:
    """SwiGLU with gate and up joined."""

    def __init__(self, module: nn.Module) -> None:
        bias = None if module.gate_proj.bias is None else torch.cat((module.gate_proj.bias, module.up_proj.bias))
        self.in_proj = FrozenLinear(torch.cat((module.gate_proj.weight, module.up_proj.weight)), bias)
        self.out_proj = FrozenLinear(module.down_proj.weight, module.down_proj.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.in_proj(x).chunk(2, dim=-1)
        return self.out_proj(F.silu(gate) * up)


class Moe:
    """The family's own mixture of experts."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.module(x.reshape(1, -1, x.shape[-1]))
        out = out[0] if isinstance(out, tuple) else out  # some families return the router's logits too
        return out.view_as(x)


@dataclass(frozen=True)
class Layer:
    input_norm: RmsNorm
    mixer: Attention | GatedDeltaNet
    post_norm: RmsNorm
    mlp: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor, rotate: Rotation, bounds: DocumentBounds, mixers: Mixers) -> torch.Tensor:
        x = x + self.mixer(self.input_norm(x), rotate, bounds, mixers)
        return x + self.mlp(self.post_norm(x))

    def expect_few_rows(self) -> None:
        """Prepare for decoding, which multiplies a few tokens at a time."""
        for part in (self.mixer, self.mlp):
            if not isinstance(part, Moe):
                part.in_proj.expect_few_rows()
                part.out_proj.expect_few_rows()
