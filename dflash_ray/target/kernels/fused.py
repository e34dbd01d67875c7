"""The functions of `plain.fused` on CUDA, one Triton kernel each; attention and the delta rule have files of their own.

Signatures and meaning are those of `plain.fused`, whose functions are the twins these are tested against. A kernel reads every input once
and writes every output once; inputs may be column slices of a joined projection, so nothing is copied to be cut. Rows are tokens: no
kernel's shape depends on how they fall into documents, and none is compiled anew for another number of tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dflash_ray.target.kernels.attention import attention
from dflash_ray.target.kernels.delta import delta_rule
from dflash_ray.target.plain.fused import E4M3_MAX, Fused, Quantised

KERNELS = {
    "attention": "varlen attention, norm with rotation, output gate: Triton",
    "delta": "convolution, decays, delta rule, gated norm: Triton; chunk inverses: flash-linear-attention",
}
_CONV_TOKENS = 16  # tokens per program of the convolution: the W-1 rows before them are read twice, out of the cache
_LIMIT = tl.constexpr(E4M3_MAX)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _store_row(out, scale, row, columns, y, mask, width, FP8: tl.constexpr):
    """One whole row of results, in 8 bits with a scale of its own or as it is."""
    if FP8:
        factor = tl.maximum(tl.max(tl.abs(y)), 1e-12) / _LIMIT
        tl.store(scale + row, factor)
        y = y / factor
    tl.store(out + row * width + columns, y.to(out.dtype.element_ty), mask=mask)


def _rows_out(tokens: int, width: int, like: torch.Tensor, fp8: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    out = torch.empty(tokens, width, device=like.device, dtype=torch.float8_e4m3fn if fp8 else like.dtype)
    return out, torch.empty(tokens, 1, device=like.device, dtype=torch.float32) if fp8 else None


def _result(out: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor | Quantised:
    return out if scale is None else Quantised(out, scale)


@triton.jit
def _rms_norm_kernel(x, add, weight, out, scale, eps, width, ADD: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    value = tl.load(x + row * width + columns, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(add + row * width + columns, mask=mask, other=0.0).to(tl.float32)
        stored = value.to(x.dtype.element_ty)
        tl.store(x + row * width + columns, stored, mask=mask)
        value = stored.to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value) / width + eps)
    y = value * factor * tl.load(weight + columns, mask=mask, other=0.0)
    _store_row(out, scale, row, columns, y, mask, width, FP8)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, add: torch.Tensor | None = None, fp8: bool = False
) -> torch.Tensor | Quantised:
    tokens, width = x.shape
    out, scale = _rows_out(tokens, width, x, fp8)
    block = triton.next_power_of_2(width)
    warps = min(max(block // 1024, 1), 16)
    _rms_norm_kernel[(tokens,)](x, add, weight, out, scale, eps, width, add is not None, fp8, block, num_warps=warps)
    return _result(out, scale)


@triton.jit
def _swiglu_kernel(gate_up, out, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    start = gate_up + row * stride + columns
    gate = tl.load(start, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(start + width, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (gate * _sigmoid(gate) * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_fp8_kernel(gate_up, out, scale, stride, width, BLOCK: tl.constexpr):
    """A row at a time: its largest value first, then the row again, out of the cache, to be scaled by it."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = columns < width
        gate = tl.load(gate_up + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * stride + width + columns, mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(gate * _sigmoid(gate) * up))
    factor = tl.maximum(tl.max(largest), 1e-12) / _LIMIT
    tl.store(scale + row, factor)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = columns < width
        gate = tl.load(gate_up + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * stride + width + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + row * width + columns, (gate * _sigmoid(gate) * up / factor).to(out.dtype.element_ty), mask=mask)


def swiglu(gate_up: torch.Tensor, *, fp8: bool = False) -> torch.Tensor | Quantised:
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out, scale = _rows_out(tokens, width, gate_up, fp8)
    if fp8:
        block = min(triton.next_power_of_2(width), 4096)
        _swiglu_fp8_kernel[(tokens,)](gate_up, out, scale, gate_up.stride(0), width, block, num_warps=8)
    else:
        block = min(triton.next_power_of_2(width), 2048)
        _swiglu_kernel[(tokens, triton.cdiv(width, block))](gate_up, out, gate_up.stride(0), width, block, num_warps=4)
    return _result(out, scale)


@triton.jit
def _norm_rope_kernel(
    joined, weight, cos, sin, positions, stride, heads, eps, NORM: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr
):
    """Both halves of some heads of one token: [HEADS, HALF] each."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    mask = (head < heads)[:, None] & (pair < D // 2)[None]
    at = row * stride + head[:, None] * D + pair[None]
    first = tl.load(joined + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(joined + at + D // 2, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + eps)[:, None]
        own = weight + head[:, None] * D + pair[None]
        first = first * factor * tl.load(own, mask=mask, other=0.0)
        second = second * factor * tl.load(own + D // 2, mask=mask, other=0.0)
    turn = tl.load(positions + row).to(tl.int64) * D + pair
    c = tl.load(cos + turn, mask=pair < D // 2, other=1.0)[None]
    s = tl.load(sin + turn + D // 2, mask=pair < D // 2, other=0.0)[None]
    tl.store(joined + at, (first * c - second * s).to(joined.dtype.element_ty), mask=mask)
    tl.store(joined + at + D // 2, (second * c + first * s).to(joined.dtype.element_ty), mask=mask)


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
    half = triton.next_power_of_2(head_dim // 2)
    together = min(triton.next_power_of_2(heads), max(2048 // half, 1))
    grid = (joined.shape[0], triton.cdiv(heads, together))
    _norm_rope_kernel[grid](
        joined, weight, cos, sin, positions, joined.stride(0), heads, eps, weight is not None, head_dim, together, half, num_warps=4
    )


@triton.jit
def _gate_kernel(mixed, gate, out, scale, gate_stride, width, GATE: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    y = tl.load(mixed + row * width + columns, mask=mask, other=0.0).to(tl.float32)
    if GATE:
        y *= _sigmoid(tl.load(gate + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32))
    _store_row(out, scale, row, columns, y, mask, width, FP8)


def gate_output(mixed: torch.Tensor, gate: torch.Tensor | None, *, fp8: bool = False) -> torch.Tensor | Quantised:
    if gate is None and not fp8:
        return mixed
    tokens, width = mixed.shape
    # in 8 bits a row needs its largest value, so one program takes all of it; otherwise the result replaces `mixed`
    out, scale = _rows_out(tokens, width, mixed, True) if fp8 else (mixed, None)
    block = triton.next_power_of_2(width) if fp8 else min(triton.next_power_of_2(width), 2048)
    grid = (tokens, triton.cdiv(width, block))
    stride = 0 if gate is None else gate.stride(0)
    _gate_kernel[grid](mixed, gate, out, scale, stride, width, gate is not None, fp8, block, num_warps=8 if fp8 else 4)
    return _result(out, scale)


@triton.jit(do_not_specialize=["tokens"])
def _conv_kernel(
    x, weight, positions, out, tokens, stride, channels, per_group, NORM: tl.constexpr, TAPS: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One head of ROWS tokens: [ROWS, BLOCK]. Heads of a group stand side by side in out [groups, tokens, per_group, D]."""
    head = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    real, inside = row < tokens, channel < D
    position = tl.load(positions + row, mask=real, other=0)
    base = x + row.to(tl.int64)[:, None] * stride + head * D + channel[None]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for back in tl.static_range(TAPS):
        seen = (real & (position >= back))[:, None] & inside[None]
        factor = tl.load(weight + (TAPS - 1 - back) * channels + head * D + channel, mask=inside, other=0.0).to(tl.float32)
        total += factor[None] * tl.load(base - back * stride, mask=seen, other=0.0).to(tl.float32)
    total *= _sigmoid(total)
    if NORM:
        total *= tl.rsqrt(tl.sum(total * total, 1) + 1e-6)[:, None]
    start = out + ((head // per_group).to(tl.int64) * tokens * per_group + head % per_group) * D
    to = start + row.to(tl.int64)[:, None] * per_group * D + channel[None]
    tl.store(to, total.to(out.dtype.element_ty), mask=real[:, None] & inside[None])


def conv_heads(
    joined: torch.Tensor, weight: torch.Tensor, k_heads: int, k_dim: int, v_heads: int, v_dim: int, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, (taps, channels), keys = joined.shape[0], weight.shape, k_heads * k_dim
    qk = torch.empty(2, tokens, k_heads, k_dim, device=joined.device, dtype=joined.dtype)
    v = torch.empty(tokens, v_heads, v_dim, device=joined.device, dtype=joined.dtype)
    blocks = triton.cdiv(tokens, _CONV_TOKENS)
    for out, heads, group, dim, first in ((qk, 2 * k_heads, k_heads, k_dim, 0), (v, v_heads, v_heads, v_dim, 2 * keys)):
        part, filters = joined[:, first:], weight[:, first:]
        block = triton.next_power_of_2(dim)
        _conv_kernel[(heads, blocks)](
            part, filters, positions, out, tokens, part.stride(0), channels, group, out is qk, taps, dim, block, _CONV_TOKENS, num_warps=2
        )
    return qk[0], qk[1], v


@triton.jit(do_not_specialize=["tokens"])
def _decay_kernel(b, a, rate, bias, g, beta, tokens, stride, heads, HEADS: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.arange(0, HEADS)
    mask = (row < tokens)[:, None] & (head < heads)[None]
    at = row[:, None] * stride + head[None]
    to = row[:, None] * heads + head[None]
    x = tl.load(a + at, mask=mask, other=0.0).to(tl.float32) + tl.load(bias + head, mask=head < heads, other=0.0)[None]
    # log(1 + e^x) without overflow
    soft = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    tl.store(g + to, tl.load(rate + head, mask=head < heads, other=0.0)[None] * soft, mask=mask)
    tl.store(beta + to, _sigmoid(tl.load(b + at, mask=mask, other=0.0).to(tl.float32)), mask=mask)


def decays(b: torch.Tensor, a: torch.Tensor, rate: torch.Tensor, dt_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads = b.shape
    g, beta = (torch.empty(tokens, heads, device=b.device, dtype=torch.float32) for _ in range(2))
    block = triton.next_power_of_2(heads)
    _decay_kernel[(triton.cdiv(tokens, 32),)](b, a, rate, dt_bias, g, beta, tokens, b.stride(0), heads, block, 32, num_warps=4)
    return g, beta


@triton.jit
def _gated_norm_kernel(
    mixed, z, weight, out, scale, z_stride, heads, eps, FP8: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, BLOCK)
    mask = (head < heads)[:, None] & (channel < D)[None]
    columns = head[:, None] * D + channel[None]
    value = tl.load(mixed + row * heads * D + columns, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(z + row * z_stride + columns, mask=mask, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
    y = value * factor * tl.load(weight + channel, mask=channel < D, other=0.0)[None] * gate * _sigmoid(gate)
    _store_row(out, scale, row, columns, y, mask, heads * D, FP8)


def gated_norm(mixed: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, *, fp8: bool = False) -> torch.Tensor | Quantised:
    tokens, heads, dim = mixed.shape
    block = triton.next_power_of_2(dim)
    together = triton.next_power_of_2(heads)
    if not fp8:  # heads are independent; in 8 bits one program takes the whole row
        together = min(together, max(2048 // block, 1))
    out, scale = _rows_out(tokens, heads * dim, mixed, fp8)
    grid = (tokens, triton.cdiv(heads, together))
    _gated_norm_kernel[grid](mixed, z, weight, out, scale, z.stride(0), heads, eps, fp8, dim, together, block, num_warps=8 if fp8 else 4)
    return _result(out, scale)


def kernel_fused() -> Fused:
    return Fused(rms_norm, swiglu, norm_rope, attention, gate_output, conv_heads, decays, delta_rule, gated_norm, KERNELS)
