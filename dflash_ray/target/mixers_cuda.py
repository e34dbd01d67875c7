"""The mixer functions on CUDA: torch's variable-length attention, flash-linear-attention's convolution and gated delta rule.

Same signatures and meaning as the CPU functions in `mixers`. With `cu_seqlens` the kernels keep documents apart; without, rows are
documents. Imported only when a target lies on a CUDA device.
"""

from __future__ import annotations

import importlib.util

import torch
from torch.nn.attention.varlen import varlen_attn

from dflash_ray.target import mixers as plain
from dflash_ray.target.mixers import Mixers, Rows, repeat_heads


def mixers() -> Mixers:
    """Kernels where they are installed. The plain functions keep documents apart just as well, one at a time."""
    if importlib.util.find_spec("fla") is None:
        return Mixers(attention, plain.short_conv, plain.delta_rule, plain.delta_prefill, "torch varlen attention, plain torch delta rule")
    return Mixers(attention, short_conv, delta_rule, delta_prefill, "torch varlen attention, flash-linear-attention")


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None, rows: Rows) -> torch.Tensor:
    if rows.cu_seqlens is None:
        return plain.attention(q, k, v, scale=scale, window=window, rows=rows)
    repeat = q.shape[2] // k.shape[2]
    q, k, v = q[0].contiguous(), k[0].contiguous(), v[0].contiguous()
    longest = max(rows.lengths)
    out = varlen_attn(
        q,
        k.repeat_interleave(repeat, dim=1),
        v.repeat_interleave(repeat, dim=1),
        rows.cu_seqlens,
        rows.cu_seqlens,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
    )
    return out.unsqueeze(0)


def short_conv(x: torch.Tensor, weight: torch.Tensor, *, rows: Rows) -> torch.Tensor:
    from fla.modules.convolution import causal_conv1d

    out = causal_conv1d(x.contiguous(), weight=weight, activation="silu", cu_seqlens=rows.cu_seqlens)
    return out[0] if isinstance(out, tuple) else out


def delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *, rows: Rows) -> torch.Tensor:
    return _delta(q, k, v, g, beta, rows)[0]


def delta_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _delta(q, k, v, g, beta, Rows())


def _delta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, rows: Rows
) -> tuple[torch.Tensor, torch.Tensor]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(
        repeat_heads(q, v.shape[2]).contiguous(),
        repeat_heads(k, v.shape[2]).contiguous(),
        v.contiguous(),
        g=g,
        beta=beta.to(v.dtype),
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=None if rows.cu_seqlens is None else rows.cu_seqlens.long(),
        output_final_state=True,
    )
