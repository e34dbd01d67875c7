"""Block attention in Triton: work follows what is visible, nothing else is read or multiplied.

A row is one query head of one slot. Rows that share a key head are put together: the G query heads of K slots of as many neighbouring
anchors as fit make one tile of 128 rows, so a key tile read once serves all of them. A tile walks over the context from the first key
that any of its rows sees to the last; masks are applied only at both ends, where its rows differ. Softmax is float32, in powers of two.

Backward is two kernels without atomics, so equal inputs give equal bits: one walks as forward does and gives the gradients of queries and
of the blocks' own keys and values; the other takes a tile of context keys and walks over the anchors that see it, a range known from two
sorted searches (`Spans`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from dflash_ray.draft.blocks.mask import Blocks
from dflash_ray.draft.kernels.limits import TILE

# keys per step of a tile's walk over the context, warps, pipeline stages
FORWARD, QUERY_GRADIENTS = (64, 8, 3), (64, 8, 3)
# keys per program and rows per step of the walk over anchors, warps, pipeline stages
KEY_GRADIENTS = (128, 64, 8, 3)
PROGRAMS = 1024  # under that many, two programs share the anchors of a tile of keys, else some multiprocessors run out of work early
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Spans:
    """Which anchors see a tile of context keys: int32 [tiles, 4] anchors from, all keys seen from, all keys seen until, until."""

    window: int | None
    of_keys: Tensor

    @classmethod
    def of(cls, blocks: Blocks, window: int | None) -> Spans:
        """Needs no wait for the device. Anchors ascend, hence so do the starts of their documents."""
        tokens, keys = len(blocks.context_positions), KEY_GRADIENTS[0]
        low = torch.arange(0, tokens, keys, device=blocks.anchors.device)
        high = (low + keys).clamp_max(tokens)  # exclusive
        reach = 2**40 if window is None else window

        def count(sorted_values: Tensor, below: Tensor) -> Tensor:
            """How many of the sorted values are less than `below`."""
            return torch.searchsorted(sorted_values, below)

        first = count(blocks.anchors, low + 1)
        last = torch.minimum(count(blocks.starts, high), count(blocks.anchors, high - 1 + reach))
        every_from = count(blocks.anchors, high)
        every_until = torch.minimum(count(blocks.starts, low + 1), count(blocks.anchors, low + 1 + reach - blocks.block_size))
        last = torch.maximum(last, first)
        every_from = torch.minimum(torch.maximum(every_from, first), last)
        every_until = torch.minimum(torch.maximum(every_until, every_from), last)
        return cls(window, torch.stack([first, every_from, every_until, last], 1).int())


@triton.jit
def _place(
    tile, anchor_ptr, start_ptr, anchors, window,
    K: constexpr, G: constexpr, SLIDING: constexpr, AT_ONCE: constexpr, ROWS: constexpr,
):  # fmt: skip
    """Of each row of a tile: its anchor's number, slot, head in the group, whether it exists, and the context [low, high) it sees."""
    row = tl.arange(0, ROWS)
    anchor = tile * AT_ONCE + row // (K * G)
    slot = (row // G) % K
    exists = (row < AT_ONCE * K * G) & (anchor < anchors)
    high = tl.load(anchor_ptr + anchor, mask=exists, other=0).to(tl.int32)
    low = tl.load(start_ptr + anchor, mask=exists, other=0).to(tl.int32)
    if SLIDING:
        low = tl.maximum(low, high + slot - window + 1)
    return anchor, slot, row % G, exists, low, high


@triton.jit
def _walk(low, high, exists, tokens, KEYS: constexpr):
    """A tile's walk over the context: begin, begin and end of the part that all its rows see, end."""
    end = tl.max(tl.where(exists, high, 0), 0)
    begin = tl.minimum(tl.min(tl.where(exists, low, tokens), 0), end)
    masked = tl.maximum(tl.max(tl.where(exists, low, 0), 0) - begin, 0)
    clear = begin + tl.minimum(tl.cdiv(masked, KEYS), tl.cdiv(end - begin, KEYS)) * KEYS
    until = tl.min(tl.where(exists, high, tokens), 0)
    until = clear + tl.maximum(until - clear, 0) // KEYS * KEYS
    return begin, clear, until, end


@triton.jit
def _own_keys(
    tile, anchor, slot, exists, anchors, window, K: constexpr, SLIDING: constexpr, AT_ONCE: constexpr, OWN: constexpr
):  # fmt: skip
    """Of the slots of a tile's blocks, as keys: row in [A*K], whether it exists, and bool [ROWS, OWN] who sees it."""
    key = tl.arange(0, OWN)
    key_anchor = tile * AT_ONCE + key // K
    there = (key < AT_ONCE * K) & (key_anchor < anchors)
    visible = (anchor[:, None] == key_anchor[None, :]) & there[None, :] & exists[:, None]
    if SLIDING:
        distance = slot[:, None] - (key % K)[None, :]
        visible = visible & (distance >= 0) & (distance < window)
    return (tile * AT_ONCE * K + key).to(tl.int64), there, visible


@triton.jit
def _attend(
    q, top, total, out, k_ptr, v_ptr, k_stride, v_stride, begin, clear, until, end, low, high, tokens, scale,
    D: constexpr, KEYS: constexpr,
):  # fmt: skip
    """Online softmax over the context: largest score, sum and weighted values so far, before and after."""
    at = tl.arange(0, D)
    for phase in tl.static_range(3):  # masked, clear, masked
        first = begin if phase == 0 else (clear if phase == 1 else until)
        last = clear if phase == 0 else (until if phase == 1 else end)
        for start in range(first, last, KEYS):
            key = start + tl.arange(0, KEYS)
            place = key.to(tl.int64)
            if phase == 1:
                k = tl.load(k_ptr + place[None, :] * k_stride + at[:, None])
                v = tl.load(v_ptr + place[:, None] * v_stride + at[None, :])
            else:
                k = tl.load(k_ptr + place[None, :] * k_stride + at[:, None], mask=(key < tokens)[None, :], other=0.0)
                v = tl.load(v_ptr + place[:, None] * v_stride + at[None, :], mask=(key < tokens)[:, None], other=0.0)
            score = tl.dot(q, k)
            if phase != 1:
                score = tl.where((key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]), score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1) * scale)
            weight = tl.exp2(score * scale - higher[:, None])  # one fused multiply-add
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.sum(weight, 1)
            out = tl.dot(weight.to(v.dtype), v, out * shrink[:, None])
            top = higher
    return top, total, out


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, k_context_ptr, v_context_ptr, out_ptr, log_ptr, anchor_ptr, start_ptr, anchors, tokens, window, scale,
    q_stride, k_stride, v_stride, k_context_stride, v_context_stride, out_stride,
    K: constexpr, G: constexpr, D: constexpr, SLIDING: constexpr, AT_ONCE: constexpr, ROWS: constexpr, OWN: constexpr, KEYS: constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # late anchors see most context: longest work first
    anchor, slot, member, exists, low, high = _place(tile, anchor_ptr, start_ptr, anchors, window, K, G, SLIDING, AT_ONCE, ROWS)
    begin, clear, until, end = _walk(low, high, exists, tokens, KEYS)
    at = tl.arange(0, D)
    slot_row = (anchor * K + slot).to(tl.int64)
    column = ((head * G + member) * D)[:, None] + at[None, :]
    q = tl.load(q_ptr + slot_row[:, None] * q_stride + column, mask=exists[:, None], other=0.0)
    own, there, visible = _own_keys(tile, anchor, slot, exists, anchors, window, K, SLIDING, AT_ONCE, OWN)
    k = tl.load(k_ptr + own[None, :] * k_stride + head * D + at[:, None], mask=there[None, :], other=0.0)
    v = tl.load(v_ptr + own[:, None] * v_stride + head * D + at[None, :], mask=there[:, None], other=0.0)
    score = tl.where(visible, tl.dot(q, k) * scale, float("-inf"))
    top = tl.where(exists, tl.max(score, 1), 0.0)  # a slot sees itself, so this is finite
    weight = tl.exp2(score - top[:, None])
    top, total, out = _attend(
        q, top, tl.sum(weight, 1), tl.dot(weight.to(v.dtype), v), k_context_ptr + head * D, v_context_ptr + head * D,
        k_context_stride, v_context_stride, begin, clear, until, end, low, high, tokens, scale, D, KEYS,
    )  # fmt: skip
    total = tl.where(exists, total, 1.0)
    out = (out / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + slot_row[:, None] * out_stride + column, out, mask=exists[:, None])
    tl.store(log_ptr + (head * anchors * K + slot_row) * G + member, top + tl.log2(total), mask=exists)


@triton.jit
def _backward_queries(
    q_ptr, k_ptr, v_ptr, k_context_ptr, v_context_ptr, out_ptr, log_ptr, out_grad_ptr, delta_ptr, q_grad_ptr, k_grad_ptr, v_grad_ptr,
    anchor_ptr, start_ptr, anchors, tokens, window, scale, natural,
    q_stride, k_stride, v_stride, k_context_stride, v_context_stride, out_stride, out_grad_stride,
    q_grad_stride, k_grad_stride, v_grad_stride,
    K: constexpr, G: constexpr, D: constexpr, SLIDING: constexpr, AT_ONCE: constexpr, ROWS: constexpr, OWN: constexpr, KEYS: constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    anchor, slot, member, exists, low, high = _place(tile, anchor_ptr, start_ptr, anchors, window, K, G, SLIDING, AT_ONCE, ROWS)
    begin, clear, until, end = _walk(low, high, exists, tokens, KEYS)
    at = tl.arange(0, D)
    slot_row = (anchor * K + slot).to(tl.int64)
    column = ((head * G + member) * D)[:, None] + at[None, :]
    mask = exists[:, None]
    q = tl.load(q_ptr + slot_row[:, None] * q_stride + column, mask=mask, other=0.0)
    out_grad = tl.load(out_grad_ptr + slot_row[:, None] * out_grad_stride + column, mask=mask, other=0.0)
    out = tl.load(out_ptr + slot_row[:, None] * out_stride + column, mask=mask, other=0.0)
    delta = tl.sum(out_grad.to(tl.float32) * out.to(tl.float32), 1)
    row = (head * anchors * K + slot_row) * G + member
    tl.store(delta_ptr + row, delta, mask=exists)
    log = tl.load(log_ptr + row, mask=exists, other=0.0)
    own, there, visible = _own_keys(tile, anchor, slot, exists, anchors, window, K, SLIDING, AT_ONCE, OWN)
    own_mask, own_column = there[:, None], head * D + at[None, :]
    own_k = tl.load(k_ptr + own[:, None] * k_stride + own_column, mask=own_mask, other=0.0)
    own_v = tl.load(v_ptr + own[:, None] * v_stride + own_column, mask=own_mask, other=0.0)
    own_weight = tl.where(visible, tl.exp2(tl.dot(q, tl.trans(own_k)) * scale - log[:, None]), 0.0)
    own_grad = (own_weight * (tl.dot(out_grad, tl.trans(own_v)) - delta[:, None])).to(q.dtype)
    q_grad = tl.dot(own_grad, own_k)
    k_grad = (tl.dot(tl.trans(own_grad), q) * natural).to(k_grad_ptr.dtype.element_ty)
    tl.store(k_grad_ptr + own[:, None] * k_grad_stride + own_column, k_grad, mask=own_mask)
    v_grad = tl.dot(tl.trans(own_weight.to(q.dtype)), out_grad).to(v_grad_ptr.dtype.element_ty)
    tl.store(v_grad_ptr + own[:, None] * v_grad_stride + own_column, v_grad, mask=own_mask)
    k_context_ptr += head * D
    v_context_ptr += head * D
    for phase in tl.static_range(3):  # masked, clear, masked
        first = begin if phase == 0 else (clear if phase == 1 else until)
        last = clear if phase == 0 else (until if phase == 1 else end)
        for start in range(first, last, KEYS):
            key = start + tl.arange(0, KEYS)
            place = key.to(tl.int64)[:, None]
            if phase == 1:
                k = tl.load(k_context_ptr + place * k_context_stride + at[None, :])
                v = tl.load(v_context_ptr + place * v_context_stride + at[None, :])
            else:
                k = tl.load(k_context_ptr + place * k_context_stride + at[None, :], mask=(key < tokens)[:, None], other=0.0)
                v = tl.load(v_context_ptr + place * v_context_stride + at[None, :], mask=(key < tokens)[:, None], other=0.0)
            weight = tl.exp2(tl.dot(q, tl.trans(k)) * scale - log[:, None])
            if phase != 1:
                weight = tl.where((key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]), weight, 0.0)
            score_grad = weight * (tl.dot(out_grad, tl.trans(v)) - delta[:, None])
            q_grad = tl.dot(score_grad.to(k.dtype), k, q_grad)
    q_grad = (q_grad * natural).to(q_grad_ptr.dtype.element_ty)
    tl.store(q_grad_ptr + slot_row[:, None] * q_grad_stride + column, q_grad, mask=mask)


@triton.jit
def _backward_keys(
    q_ptr, k_context_ptr, v_context_ptr, log_ptr, delta_ptr, out_grad_ptr, k_grad_ptr, v_grad_ptr, anchor_ptr, start_ptr, span_ptr,
    anchors, tokens, window, scale, natural, q_stride, k_stride, v_stride, out_grad_stride, k_grad_stride, v_grad_stride, part_stride,
    K: constexpr, G: constexpr, D: constexpr, SLIDING: constexpr, KEYS: constexpr, STEP: constexpr, PARTS: constexpr,
):  # fmt: skip
    head = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    tile = tl.program_id(1)  # early keys are seen by most anchors: longest work first
    at = tl.arange(0, D)
    key = tile * KEYS + tl.arange(0, KEYS)
    mask = (key < tokens)[:, None]
    place = key.to(tl.int64)[:, None]
    k = tl.load(k_context_ptr + place * k_stride + head * D + at[None, :], mask=mask, other=0.0)
    v = tl.load(v_context_ptr + place * v_stride + head * D + at[None, :], mask=mask, other=0.0)
    begin = tl.load(span_ptr + tile * 4) * (K * G)
    clear = tl.load(span_ptr + tile * 4 + 1) * (K * G)
    until = tl.load(span_ptr + tile * 4 + 2) * (K * G)
    end = tl.load(span_ptr + tile * 4 + 3) * (K * G)
    if PARTS > 1:
        each = tl.cdiv(tl.cdiv(end - begin, PARTS), STEP) * STEP
        begin = tl.minimum(begin + part * each, end)
        end = tl.minimum(begin + each, end)
        clear = tl.minimum(tl.maximum(clear, begin), end)
        until = tl.minimum(tl.maximum(until, clear), end)
        k_grad_ptr += part.to(tl.int64) * part_stride
        v_grad_ptr += part.to(tl.int64) * part_stride
    q_ptr += head * G * D
    out_grad_ptr += head * G * D
    log_ptr += head.to(tl.int64) * anchors * (K * G)
    delta_ptr += head.to(tl.int64) * anchors * (K * G)
    k_grad = tl.zeros([KEYS, D], tl.float32)
    v_grad = tl.zeros([KEYS, D], tl.float32)
    for phase in tl.static_range(3):  # masked, clear, masked
        first = begin if phase == 0 else (clear if phase == 1 else until)
        last = clear if phase == 0 else (until if phase == 1 else end)
        for start in range(first, last, STEP):
            row = start + tl.arange(0, STEP)
            exists = row < last
            slot_row = (row // G).to(tl.int64)[:, None]
            column = ((row % G) * D)[:, None] + at[None, :]
            q = tl.load(q_ptr + slot_row * q_stride + column, mask=exists[:, None], other=0.0)
            out_grad = tl.load(out_grad_ptr + slot_row * out_grad_stride + column, mask=exists[:, None], other=0.0)
            log = tl.load(log_ptr + row, mask=exists, other=float("inf"))  # a row that does not exist weighs nothing
            delta = tl.load(delta_ptr + row, mask=exists, other=0.0)
            weight = tl.exp2(tl.dot(k, tl.trans(q)) * scale - log[None, :])  # [KEYS, STEP]
            if phase != 1:
                anchor = row // (K * G)
                high = tl.load(anchor_ptr + anchor, mask=exists, other=0).to(tl.int32)
                low = tl.load(start_ptr + anchor, mask=exists, other=0).to(tl.int32)
                if SLIDING:
                    low = tl.maximum(low, high + (row // G) % K - window + 1)
                weight = tl.where((key[:, None] >= low[None, :]) & (key[:, None] < high[None, :]), weight, 0.0)
            v_grad = tl.dot(weight.to(out_grad.dtype), out_grad, v_grad)
            score_grad = weight * (tl.dot(v, tl.trans(out_grad)) - delta[None, :])
            k_grad = tl.dot(score_grad.to(q.dtype), q, k_grad)
    k_grad = (k_grad * natural).to(k_grad_ptr.dtype.element_ty)
    tl.store(k_grad_ptr + place * k_grad_stride + head * D + at[None, :], k_grad, mask=mask)
    tl.store(v_grad_ptr + place * v_grad_stride + head * D + at[None, :], v_grad.to(v_grad_ptr.dtype.element_ty), mask=mask)


def _tile(block: int, group: int) -> tuple[int, int]:
    """Blocks of a tile, and its own keys, a power of two."""
    at_once = TILE // (block * group)
    return at_once, max(16, triton.next_power_of_2(at_once * block))


def forward(
    q: Tensor, k: Tensor, v: Tensor, k_context: Tensor, v_context: Tensor, blocks: Blocks, window: int | None
) -> tuple[Tensor, Tensor]:
    """q [A*K, N, D], k, v [A*K, M, D], k_context, v_context [T, M, D], heads contiguous, any row stride; -> out [A*K, N, D] and the log2
    of each row's softmax sum, float32 [M, A*K, N/M]."""
    rows, heads, width = q.shape
    kv_heads, anchors = k.shape[1], len(blocks.anchors)
    group = heads // kv_heads
    keys, warps, stages = FORWARD
    at_once, own = _tile(blocks.block_size, group)
    out, log = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(kv_heads, rows, group, dtype=torch.float32)
    _forward[(kv_heads, triton.cdiv(anchors, at_once))](
        q, k, v, k_context, v_context, out, log, blocks.anchors, blocks.starts, anchors, len(k_context), window or 0,
        width**-0.5 * _LOG2_E, *(part.stride(0) for part in (q, k, v, k_context, v_context, out)),
        blocks.block_size, group, width, window is not None, at_once, TILE, own, keys, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, log


def backward(
    q: Tensor, k: Tensor, v: Tensor, k_context: Tensor, v_context: Tensor, blocks: Blocks, spans: Spans,
    out: Tensor, log: Tensor, out_grad: Tensor, grads: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Writes the gradients of q, k, v, k_context, v_context into `grads`; shapes and strides as in `forward`."""
    rows, heads, width = q.shape
    kv_heads, anchors, window = k.shape[1], len(blocks.anchors), spans.window
    group = heads // kv_heads
    q_grad, k_grad, v_grad, k_context_grad, v_context_grad = grads
    delta, natural = torch.empty_like(log), width**-0.5
    common = (blocks.block_size, group, width, window is not None)
    keys, warps, stages = QUERY_GRADIENTS
    at_once, own = _tile(blocks.block_size, group)
    _backward_queries[(kv_heads, triton.cdiv(anchors, at_once))](
        q, k, v, k_context, v_context, out, log, out_grad, delta, q_grad, k_grad, v_grad, blocks.anchors, blocks.starts,
        anchors, len(k_context), window or 0, natural * _LOG2_E, natural,
        *(part.stride(0) for part in (q, k, v, k_context, v_context, out, out_grad, q_grad, k_grad, v_grad)),
        *common, at_once, TILE, own, keys, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    keys, step, warps, stages = KEY_GRADIENTS
    tiles = triton.cdiv(len(k_context), keys)
    parts = 2 if tiles * kv_heads < PROGRAMS else 1
    k_part, v_part = k_context_grad, v_context_grad
    if parts > 1:
        sums = q.new_empty(parts, 2, *k_context.shape, dtype=torch.promote_types(q.dtype, torch.float32))
        k_part, v_part = sums[0]
    _backward_keys[(kv_heads * parts, tiles)](
        q, k_context, v_context, log, delta, out_grad, k_part, v_part, blocks.anchors, blocks.starts, spans.of_keys,
        anchors, len(k_context), window or 0, natural * _LOG2_E, natural,
        *(part.stride(0) for part in (q, k_context, v_context, out_grad, k_part, v_part)), 2 * k_context.numel(),
        *common, keys, step, parts, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if parts > 1:
        for index, grad in enumerate((k_context_grad, v_context_grad)):
            torch.add(sums[0, index], sums[1, index], out=grad)


class BlockAttention(torch.autograd.Function):
    """Block attention through the kernels, for autograd: the signature of `dflash.attention.Attention`."""

    @staticmethod
    def forward(context, q, k_slots, v_slots, k_context, v_context, blocks, window):
        inputs = [*(part.flatten(0, 1).contiguous() for part in (q, k_slots, v_slots)), k_context.contiguous(), v_context.contiguous()]
        out, log = forward(*inputs, blocks, window)
        context.save_for_backward(*inputs, out, log)
        context.place = blocks, window
        return out.view(q.shape)

    @staticmethod
    def backward(context, out_grad):
        *inputs, out, log = context.saved_tensors
        blocks, window = context.place
        grads = tuple(torch.empty_like(part) for part in inputs)
        backward(*inputs, blocks, Spans.of(blocks, window), out, log, out_grad.flatten(0, 1).contiguous(), grads)
        slots = (part.unflatten(0, (-1, blocks.block_size)) for part in grads[:3])
        return *slots, *grads[3:], None, None
