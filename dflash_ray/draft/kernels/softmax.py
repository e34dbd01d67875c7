"""The head pass in Triton: a chunk of logits becomes, in its own memory, the gradient that goes back through the head.

A row is read for its largest value and argmax, then read once more and overwritten with exp(logit - largest), while the sum is taken in
float32 from the values before rounding. The label's entry gets the sum subtracted; the division by the sum happens after the product, on
[rows, H] instead of [rows, V]. So one bf16 buffer [chunk, V] is all that exists of the logits, and the head is used twice per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_ray.draft.loss import HeadPass, plain_head
from dflash_ray.draft.ops import product


@triton.jit
def _softmax_rows(logit_ptr, label_ptr, log_q_ptr, guess_ptr, total_ptr, size, stride, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    logit_ptr += row.to(tl.int64) * stride
    at = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    for first in range(0, size, BLOCK):
        value = tl.load(logit_ptr + first + at, mask=first + at < size, other=float("-inf")).to(tl.float32)
        place = tl.where(value > largest, first + at, place)
        largest = tl.maximum(largest, value)
    top = tl.max(largest, 0)
    tl.store(guess_ptr + row, tl.min(tl.where(largest == top, place, size), 0).to(tl.int64))
    label = tl.load(label_ptr + row)
    own = tl.load(logit_ptr + label).to(tl.float32) - top
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        inside = first + at < size
        value = tl.exp(tl.load(logit_ptr + first + at, mask=inside, other=float("-inf")).to(tl.float32) - top)
        total += value
        if GRADIENT:
            tl.store(logit_ptr + first + at, value.to(logit_ptr.dtype.element_ty), mask=inside)
    whole = tl.sum(total, 0)
    tl.store(log_q_ptr + row, own - tl.log(whole))
    tl.store(total_ptr + row, whole)
    if GRADIENT:
        tl.debug_barrier()  # another thread wrote this entry
        tl.store(logit_ptr + label, (tl.exp(own) - whole).to(logit_ptr.dtype.element_ty))


def softmax_rows(logits: Tensor, labels: Tensor, gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
    """logits [r, V], labels int64 [r] -> log probability of the label float32 [r], argmax int64 [r] (the first one), sum float32 [r].

    With `gradient` the logits are overwritten with exp(logit - largest) - sum x one_hot."""
    rows, size = logits.shape
    log_q, total = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    guess = torch.empty_like(labels)
    block = min(8192, triton.next_power_of_2(size))
    warps = 16 if block >= 4096 else 4
    _softmax_rows[(rows,)](logits, labels, log_q, guess, total, size, logits.stride(0), gradient, block, num_warps=warps)
    return log_q, guess, total


@torch.no_grad()
def triton_head(
    rows: Tensor, head: Tensor, tokens: Tensor, teacher: Tensor | None, kl_scale: float, tv_scale: float, chunk: int, gradients: bool
) -> HeadPass:
    """Twin of `plain_head`, which it calls for float64 and for teacher rows: a distribution needs more than its label's entry."""
    if teacher is not None or rows.dtype == torch.float64:
        return plain_head(rows, head, tokens, teacher, kl_scale, tv_scale, chunk, gradients)
    buffer = rows.new_empty(min(chunk, len(rows)), len(head))
    wide = torch.promote_types(rows.dtype, torch.float32)
    hard = torch.empty(rows.shape, dtype=wide, device=rows.device) if gradients else None
    parts = []
    for low in range(0, len(rows), chunk):
        part = slice(low, min(low + chunk, len(rows)))
        logits = buffer[: part.stop - low]
        torch.mm(rows[part], head.T, out=logits)
        parts.append(softmax_rows(logits, tokens[part], gradients))
        if hard is not None:
            product(logits, head, hard[part])
    log_q, guess, total = (torch.cat(column) for column in zip(*parts, strict=True))
    if hard is not None:
        hard.div_(total[:, None])
    return HeadPass(log_q, guess, hard, None, None, None)
