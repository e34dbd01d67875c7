"""Causal attention of one packed pass on CUDA: documents of any length, few key heads for many query heads, an optional window.

torch's flash attention reaches 280 TFLOP/s on an H200 at a head size of 256, this kernel 400: the same running softmax (Dao 2023,
"FlashAttention-2") in tiles for that size, on Hopper's own matrix instructions. Tiles wholly in the past need no mask and are taken first.
The list of query blocks is made once per batch, the longest rows of work first.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from dflash_ray.target.plain.mixers import DocumentBounds

LOG2_E = 1.4426950408889634


class Tiles(NamedTuple):
    queries: int  # rows of a program
    keys: int  # of a step
    warps: int
    stages: int


@functools.cache
def tiles_for(device: torch.device) -> Tiles:
    """The fastest tiles whose (queries + 2 x stages x keys) x 256 x 2 B fit the shared memory of one program."""
    if device.type == "cuda" and torch.cuda.get_device_properties(device).shared_memory_per_block_optin < 196_608:
        return Tiles(64, 32, 4, 2)
    return Tiles(128, 64, 8, 2)


def query_blocks(lengths: np.ndarray, device: torch.device) -> np.ndarray:
    """int32 [blocks, 2]: document and number within it of every block of queries, those with the most keys before them first."""
    counts = -(-lengths // tiles_for(device).queries)
    document = np.repeat(np.arange(len(lengths)), counts)
    block = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    order = np.argsort(-block, kind="stable")
    return np.stack((document, block), 1)[order].astype(np.int32)


@triton.jit
def _tile(
    acc, most, total, b_q, k, v, k_stride, v_stride, first, row, end, scale, MASK: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One tile of BN keys from position `first` into the running softmax."""
    key = first + tl.arange(0, BN)
    channel = tl.arange(0, BD)
    if MASK or BD > D:
        mask = (key < end)[:, None] & (channel < D)[None]
        b_k = tl.load(k + key[:, None] * k_stride + channel[None], mask=mask, other=0.0)
        b_v = tl.load(v + key[:, None] * v_stride + channel[None], mask=mask, other=0.0)
    else:
        b_k = tl.load(k + key[:, None] * k_stride + channel[None])
        b_v = tl.load(v + key[:, None] * v_stride + channel[None])
    scores = tl.dot(b_q, tl.trans(b_k)) * scale
    if MASK:
        seen = (key[None] <= row[:, None]) & (key[None] < end)
        if WINDOW > 0:
            seen = seen & (row[:, None] - key[None] < WINDOW)
        scores = tl.where(seen, scores, -1e30)
    higher = tl.maximum(most, tl.max(scores, 1))
    weight = tl.exp2(scores - higher[:, None])
    if MASK:
        weight = tl.where(seen, weight, 0.0)
    fade = tl.exp2(most - higher)
    acc = tl.dot(weight.to(b_v.dtype), b_v, acc * fade[:, None])
    return acc, higher, total * fade + tl.sum(weight, 1)


@triton.jit
def _attention_kernel(
    q, k, v, out, bounds, blocks, q_stride, k_stride, v_stride, scale, N: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    document, block = tl.load(blocks + 2 * tl.program_id(1)), tl.load(blocks + 2 * tl.program_id(1) + 1)
    start = tl.load(bounds + document).to(tl.int64)
    end = tl.load(bounds + document + 1) - tl.load(bounds + document)
    q += start * q_stride + head * D
    k += start * k_stride + head // GROUP * D
    v += start * v_stride + head // GROUP * D
    row, channel = block * BM + tl.arange(0, BM), tl.arange(0, BD)
    mask = (row < end)[:, None] & (channel < D)[None]
    b_q = tl.load(q + row[:, None] * q_stride + channel[None], mask=mask, other=0.0)
    acc = tl.zeros((BM, BD), tl.float32)
    most = tl.full((BM,), -1e30, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    diagonal = block * BM  # keys before it are seen by every row, unless a window hides them
    if WINDOW > 0:
        diagonal = tl.maximum(0, (block * BM - WINDOW + 1) // BN * BN)
    else:
        for first in tl.range(0, diagonal, BN, num_stages=STAGES):
            acc, most, total = _tile(
                acc, most, total, b_q, k, v, k_stride, v_stride, first, row, end, scale, False, WINDOW, D, BN, BD
            )  # fmt: skip
    for first in tl.range(diagonal, tl.minimum(block * BM + BM, end), BN, num_stages=STAGES):
        acc, most, total = _tile(acc, most, total, b_q, k, v, k_stride, v_stride, first, row, end, scale, True, WINDOW, D, BN, BD)
    to = out + ((start + row)[:, None] * N + head) * D + channel[None]
    tl.store(to, (acc / tl.maximum(total, 1e-30)[:, None]).to(out.dtype.element_ty), mask=mask)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None, bounds: DocumentBounds
) -> torch.Tensor:
    """`plain.fused.attention`; rows of q, k and v may lie apart, their heads side by side."""
    tokens, heads, dim = q.shape
    out = torch.empty(tokens, heads, dim, device=q.device, dtype=q.dtype)
    tiles = tiles_for(q.device)
    _attention_kernel[(heads, bounds.query_blocks.shape[0])](
        q, k, v, out, bounds.cu_seqlens, bounds.query_blocks, q.stride(0), k.stride(0), v.stride(0), scale * LOG2_E,
        heads, heads // k.shape[1], window or 0, dim, max(triton.next_power_of_2(dim), 16),
        tiles.queries, tiles.keys, tiles.stages, num_warps=tiles.warps,
    )  # fmt: skip
    return out.flatten(1)
