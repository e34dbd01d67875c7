"""The mixer functions on CUDA: torch's flash attention, flash-linear-attention's convolution and gated delta rule.

Same signatures and meaning as the functions of `plain.mixers`. With `cu_seqlens` the kernels keep documents apart; without, rows are
documents. Key and value heads are never copied for the query or value heads they serve. Imported only when a target lies on a CUDA device.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import torch

from dflash_ray.target.kernels.attention import query_blocks
from dflash_ray.target.kernels.delta import CHUNK
from dflash_ray.target.plain import mixers as plain
from dflash_ray.target.plain.mixers import DocumentBounds, Mixers


def kernel_mixers() -> Mixers:
    """Kernels where they are installed. The plain functions keep documents apart just as well, one at a time."""
    if importlib.util.find_spec("fla") is None:
        return Mixers(attention, plain.short_conv, plain.delta_rule, plain.delta_prefill)
    return Mixers(attention, short_conv, delta_rule, delta_prefill)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None, bounds: DocumentBounds
) -> torch.Tensor:
    if bounds.cu_seqlens is None:
        return plain.attention(q, k, v, scale=scale, window=window, bounds=bounds)
    longest = max(bounds.lengths)
    # the operator below torch's `varlen_attn`, whose wrapper in torch 2.11 asks for as many key heads as query heads
    return torch.ops.aten._flash_attention_forward(
        q[0],
        k[0],
        v[0],
        bounds.cu_seqlens,
        bounds.cu_seqlens,
        longest,
        longest,
        0.0,
        window is None,
        False,
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0][None]


def short_conv(x: torch.Tensor, weight: torch.Tensor, *, bounds: DocumentBounds) -> torch.Tensor:
    from fla.modules.convolution import causal_conv1d

    out = causal_conv1d(x.contiguous(), weight=weight, activation="silu", cu_seqlens=bounds.cu_seqlens)
    return out[0] if isinstance(out, tuple) else out


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *, bounds: DocumentBounds
) -> torch.Tensor:
    return _delta(q, k, v, g, beta, bounds, state=False)[0]


def delta_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _delta(q, k, v, g, beta, DocumentBounds(), state=True)


def kernel_bounds(bounds: np.ndarray, device: torch.device, *, delta: bool) -> DocumentBounds:
    """Documents with `bounds` int64 [D+1], and everything the kernels of a pass derive from them, on `device`.

    Made on the host, once per batch: kernel libraries would otherwise ask the device for the number of chunks and wait for everything
    queued there. `delta_index`: bounds int64 [D+1]; document and number within it of every chunk, int64 [chunks, 2]; the documents, longest
    first, int64 [D]. `query_blocks`: see `kernels.attention`.
    """
    lengths = np.diff(bounds)

    def moved(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).pin_memory().to(device, non_blocking=True)

    index = None
    if delta:
        counts = -(-lengths // CHUNK)
        document = np.repeat(np.arange(len(lengths)), counts)
        chunk = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        index = moved(bounds), moved(np.stack((document, chunk), 1)), moved(np.argsort(-lengths, kind="stable"))
    return DocumentBounds(moved(bounds.astype(np.int32)), tuple(lengths.tolist()), index, moved(query_blocks(lengths, device)))


def _delta(q, k, v, g, beta, bounds: DocumentBounds, *, state: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(
        q,
        k,
        v,
        g=g,
        beta=beta,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=None if bounds.cu_seqlens is None else bounds.cu_seqlens.long(),
        output_final_state=state,
    )
