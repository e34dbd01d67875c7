"""Row-wise kernels: norms, SwiGLU, and the normalised, rotated heads of queries and keys.

All of them are bound by memory: a row is read once, worked on in float32 registers and written once. Signatures and meaning are those of
the plain functions in `ops`. Backward kernels recompute what the forward pass did not keep, because reading a row again costs less than
keeping its result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 8  # heads per program of the head kernels


@triton.jit
def _norm(x_ptr, add_ptr, weight_ptr, stream_ptr, out_ptr, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(x_ptr + row + at, mask=inside, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(add_ptr + row + at, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(stream_ptr + row + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + at, (wide * scale * weight).to(x.dtype), mask=inside)


@triton.jit
def _norm_backward(
    x_ptr, weight_ptr, grad_ptr, residual_ptr, normed_ptr, partial_ptr, rows, size, eps,
    RESIDUAL: tl.constexpr, NORMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < size
    partial = tl.zeros([BLOCK], tl.float32)
    step = tl.num_programs(0)
    place = tl.program_id(0).to(tl.int64) * size + at
    x = tl.load(x_ptr + place, mask=inside, other=0.0)
    grad_out = tl.load(grad_ptr + place, mask=inside, other=0.0)
    for row in range(tl.program_id(0), rows, step):
        wide = x.to(tl.float32)
        grad = grad_out.to(tl.float32)
        here = place
        # the next row and the residual are on their way while this row is summed
        place += step.to(tl.int64) * size
        following = inside & (row + step < rows)
        x = tl.load(x_ptr + place, mask=following, other=0.0)
        grad_out = tl.load(grad_ptr + place, mask=following, other=0.0)
        if RESIDUAL:
            residual = tl.load(residual_ptr + here, mask=inside, other=0.0)
        weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
        unit = wide * scale
        partial += grad * unit
        grad = grad * weight
        out = scale * (grad - unit * (tl.sum(grad * unit, 0) / size))
        if RESIDUAL:
            out += residual.to(tl.float32)
        tl.store(grad_ptr + here, out.to(grad_ptr.dtype.element_ty), mask=inside)
        if NORMED:
            tl.store(normed_ptr + here, (unit * weight).to(x.dtype), mask=inside)
    tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * size + at, partial, mask=inside)


@triton.jit
def _swiglu(both_ptr, out_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(both_ptr + row * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + row * 2 * size + size + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + at, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(both_ptr, grad_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate_ptr = both_ptr + row * 2 * size + at
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + size, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * size + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    kind = both_ptr.dtype.element_ty
    tl.store(gate_ptr, (grad * up * share * (1 + gate - silu)).to(kind), mask=inside)
    tl.store(gate_ptr + size, (grad * silu).to(kind), mask=inside)
    tl.store(grad_ptr + row * size + at, (silu * up).to(kind), mask=inside)


@triton.jit
def _norm_rope(
    x_ptr, out_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, x_stride, out_stride, eps,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    groups: tl.constexpr = (QUERIES + HEADS - 1) // HEADS
    of_queries = tl.program_id(1) < groups
    first = tl.where(of_queries, tl.program_id(1) * HEADS, QUERIES + (tl.program_id(1) - groups) * HEADS)
    head = first + tl.arange(0, HEADS)[:, None]
    inside = head < tl.where(of_queries, QUERIES, QUERIES + KEYS)
    at = tl.arange(0, HALF)[None, :]
    weight_a = tl.where(of_queries, tl.load(q_weight_ptr + at), tl.load(k_weight_ptr + at)).to(tl.float32)
    weight_b = tl.where(of_queries, tl.load(q_weight_ptr + HALF + at), tl.load(k_weight_ptr + HALF + at)).to(tl.float32)
    cos, sin = tl.load(cos_ptr + row * HALF + at), tl.load(sin_ptr + row * HALF + at)
    place = x_ptr + row * x_stride + head * (2 * HALF) + at
    a = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
    a, b = a * scale * weight_a, b * scale * weight_b
    place = out_ptr + row * out_stride + head * (2 * HALF) + at
    kind = out_ptr.dtype.element_ty
    tl.store(place, (a * cos - b * sin).to(kind), mask=inside)
    tl.store(place + HALF, (b * cos + a * sin).to(kind), mask=inside)


@triton.jit
def _norm_rope_backward(
    x_ptr, grad_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, partial_ptr, rows, x_stride, grad_stride, eps,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    groups: tl.constexpr = (QUERIES + HEADS - 1) // HEADS
    of_queries = tl.program_id(1) < groups
    first = tl.where(of_queries, tl.program_id(1) * HEADS, QUERIES + (tl.program_id(1) - groups) * HEADS)
    head = first + tl.arange(0, HEADS)[:, None]
    inside = head < tl.where(of_queries, QUERIES, QUERIES + KEYS)
    at = tl.arange(0, HALF)[None, :]
    weight_a = tl.where(of_queries, tl.load(q_weight_ptr + at), tl.load(k_weight_ptr + at)).to(tl.float32)
    weight_b = tl.where(of_queries, tl.load(q_weight_ptr + HALF + at), tl.load(k_weight_ptr + HALF + at)).to(tl.float32)
    partial_a = tl.zeros([HEADS, HALF], tl.float32)
    partial_b = tl.zeros([HEADS, HALF], tl.float32)
    for number in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        cos, sin = tl.load(cos_ptr + row * HALF + at), tl.load(sin_ptr + row * HALF + at)
        place = x_ptr + row * x_stride + head * (2 * HALF) + at
        a = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        a, b = a * scale, b * scale
        place = grad_ptr + row * grad_stride + head * (2 * HALF) + at
        grad_out_a = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        grad_out_b = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
        grad_a = grad_out_a * cos + grad_out_b * sin
        grad_b = grad_out_b * cos - grad_out_a * sin
        partial_a += grad_a * a
        partial_b += grad_b * b
        grad_a, grad_b = grad_a * weight_a, grad_b * weight_b
        mean = ((tl.sum(grad_a * a, 1) + tl.sum(grad_b * b, 1)) / (2 * HALF))[:, None]
        kind = grad_ptr.dtype.element_ty
        tl.store(place, (scale * (grad_a - a * mean)).to(kind), mask=inside)
        tl.store(place + HALF, (scale * (grad_b - b * mean)).to(kind), mask=inside)
    place = partial_ptr + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * (2 * HALF) + tl.arange(0, HALF)
    tl.store(place, tl.sum(partial_a, 0))
    tl.store(place + HALF, tl.sum(partial_b, 0))


def _block(size: int) -> tuple[int, int]:
    """Lanes for a whole row and warps for them."""
    block = triton.next_power_of_2(size)
    return block, min(16, max(1, block // 1024))


def _programs(rows: int, each: int, device: torch.device) -> int:
    """Programs of a kernel that sums over rows: `each` per multiprocessor, so that few partial sums are left."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return max(1, min(rows, each * processors))


def norm(x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None) -> tuple[Tensor, Tensor]:
    rows, size = x.shape
    stream, out = (x if add is None else torch.empty_like(x)), torch.empty_like(x)
    block, warps = _block(size)
    _norm[(rows,)](x, x if add is None else add, weight, stream, out, size, eps, add is not None, block, num_warps=warps)
    return stream, out


def norm_backward(
    x: Tensor, weight: Tensor, eps: float, grad: Tensor, residual: Tensor | None = None, again: bool = True
) -> tuple[Tensor | None, Tensor]:
    rows, size = x.shape
    normed = torch.empty_like(x) if again else None
    block = triton.next_power_of_2(size)
    warps = min(16, max(1, block // 512))
    programs = _programs(rows, 1, x.device)
    partial = torch.empty(programs, size, dtype=torch.float32, device=x.device)
    _norm_backward[(programs,)](
        x, weight, grad, grad if residual is None else residual, x if normed is None else normed, partial, rows, size, eps,
        residual is not None, again, block, num_warps=warps,
    )  # fmt: skip
    return normed, partial.sum(0)


def swiglu(both: Tensor) -> Tensor:
    rows, size = len(both), both.shape[1] // 2
    out = both.new_empty(rows, size)
    block = min(1024, triton.next_power_of_2(size))
    _swiglu[(rows, triton.cdiv(size, block))](both, out, size, block, num_warps=4)
    return out


def swiglu_backward(both: Tensor, grad: Tensor) -> None:
    rows, size = grad.shape
    block = min(1024, triton.next_power_of_2(size))
    _swiglu_backward[(rows, triton.cdiv(size, block))](both, grad, size, block, num_warps=4)


def norm_rope(x: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, queries: int, keys: int, eps: float) -> Tensor:
    half = cos.shape[1]
    out = x.new_empty(len(x), (queries + keys) * 2 * half)
    grid = (len(x), triton.cdiv(queries, HEADS) + triton.cdiv(keys, HEADS))
    _norm_rope[grid](
        x, out, q_weight, k_weight, cos, sin, x.stride(0), out.stride(0), eps, queries, keys, half, HEADS, num_warps=1
    )  # fmt: skip
    return out


def norm_rope_backward(
    x: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, queries: int, keys: int, eps: float, grad: Tensor
) -> tuple[Tensor, Tensor]:
    half = cos.shape[1]
    groups = triton.cdiv(queries, HEADS)
    grid = (_programs(len(x), 8, x.device), groups + triton.cdiv(keys, HEADS))
    partial = torch.empty(*grid, 2 * half, dtype=torch.float32, device=x.device)
    _norm_rope_backward[grid](
        x, grad, q_weight, k_weight, cos, sin, partial, len(x), x.stride(0), grad.stride(0), eps, queries, keys, half, HEADS, num_warps=1
    )  # fmt: skip
    return partial[:, :groups].sum((0, 1)), partial[:, groups:].sum((0, 1))
