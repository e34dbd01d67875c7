"""The mixer functions on CUDA: torch's flash attention, flash-linear-attention's convolution and gated delta rule.

Same signatures and meaning as the CPU functions in `mixers`. With `cu_seqlens` the kernels keep documents apart; without, rows are
documents. Key and value heads are never copied for the query or value heads they serve. Imported only when a target lies on a CUDA device.
"""

from __future__ import annotations

import torch

from dflash_ray.target import mixers
from dflash_ray.target.mixers import Rows

_CHUNK = 64  # tokens per program of flash-linear-attention's delta rule


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None, rows: Rows) -> torch.Tensor:
    if rows.cu_seqlens is None:
        return mixers.attention(q, k, v, scale=scale, window=window, rows=rows)
    return varlen_attention(q[0], k[0], v[0], scale=scale, window=window, rows=rows)[None]


def varlen_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None, rows: Rows) -> torch.Tensor:
    """q [T, N, D], k and v [T, Nkv, D], rows at any distance from each other: [T, N, D].

    The operator below torch's `varlen_attn`, whose wrapper in torch 2.11 asks for as many key heads as query heads.
    """
    longest = max(rows.lengths)
    return torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        rows.cu_seqlens,
        rows.cu_seqlens,
        longest,
        longest,
        0.0,
        window is None,
        False,
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]


def short_conv(x: torch.Tensor, weight: torch.Tensor, *, rows: Rows) -> torch.Tensor:
    from fla.modules.convolution import causal_conv1d

    out = causal_conv1d(x.contiguous(), weight=weight, activation="silu", cu_seqlens=rows.cu_seqlens)
    return out[0] if isinstance(out, tuple) else out


def delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *, rows: Rows) -> torch.Tensor:
    return _delta(q, k, v, g, beta, rows, normalise=True, state=False)[0]


def delta_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _delta(q, k, v, g, beta, Rows(), normalise=True, state=True)


def varlen_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *, rows: Rows
) -> torch.Tensor:
    """q, k [T, Nk, Dk] of length 1, v [T, Nv, Dv], g and beta [T, Nv]: [T, Nv, Dv]."""
    return _delta(q[None], k[None], v[None], g[None], beta[None], rows, normalise=False, state=False)[0][0]


def delta_index(cu_seqlens: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds int64 [D+1] on `device`, and document and number within it of every chunk, int64 [chunks, 2], from bounds on the host.

    Made once per batch: the kernels would otherwise ask the device for the number of chunks and wait for everything queued there.
    """
    from fla.ops.utils import prepare_chunk_indices

    bounds = cu_seqlens.long()
    return tuple(x.pin_memory().to(device, non_blocking=True) for x in (bounds, prepare_chunk_indices(bounds, _CHUNK)))


def _delta(q, k, v, g, beta, rows: Rows, *, normalise: bool, state: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    bounds, chunks = None, None
    if rows.cu_seqlens is not None:
        bounds, chunks = rows.delta_index or (rows.cu_seqlens.long(), None)
    return chunk_gated_delta_rule(
        q,
        k,
        v,
        g=g,
        beta=beta,
        use_qk_l2norm_in_kernel=normalise,
        cu_seqlens=bounds,
        chunk_indices=chunks,
        output_final_state=state,
    )
