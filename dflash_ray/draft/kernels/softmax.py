"""Softmax over rows of logits in Triton: logits become, in their own memory, the gradient that goes back through the head.

A row is read for its largest value and argmax, then read once more and overwritten with exp(logit - largest), while the sum is taken in
float32 from the values before rounding. The label's entry gets the sum subtracted; the division by the sum happens after the matmul, on
[rows, H] instead of [rows, V]. So one bf16 buffer [chunk, V] is all that exists of the logits, and the head is used twice per row.

With teacher rows two such buffers exist, and both rows of logits are read together, three times: for the largest values; for the sums and
KL, as the teacher's mean of the difference of logits; for total variation and the gradients, which overwrite them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_ray.config.schema import LossConfig


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


@triton.jit
def _teacher_rows(
    logit_ptr, teacher_ptr, label_ptr, log_q_ptr, guess_ptr, kl_ptr, tv_ptr, size, stride, ce_scale, kl_scale, tv_scale, dpace_scale,
    dpace_kl_scale, WEIGHT: tl.constexpr, ANCHORS: tl.constexpr, SLOPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    logit_ptr += row.to(tl.int64) * stride
    teacher_ptr += row.to(tl.int64) * stride
    at = tl.arange(0, BLOCK)
    low = float("-inf")
    largest = tl.full([BLOCK], low, tl.float32)
    likeliest = tl.full([BLOCK], low, tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    for first in range(0, size, BLOCK):
        inside = first + at < size
        value = tl.load(logit_ptr + first + at, mask=inside, other=low).to(tl.float32)
        place = tl.where(value > largest, first + at, place)
        largest = tl.maximum(largest, value)
        likeliest = tl.maximum(likeliest, tl.load(teacher_ptr + first + at, mask=inside, other=low).to(tl.float32))
    top = tl.max(largest, 0)
    teacher_top = tl.max(likeliest, 0)
    tl.store(guess_ptr + row, tl.min(tl.where(largest == top, place, size), 0).to(tl.int64))
    label = tl.load(label_ptr + row)
    own = tl.load(logit_ptr + label).to(tl.float32) - top
    total = tl.zeros([BLOCK], tl.float32)
    teacher_total = tl.zeros([BLOCK], tl.float32)
    cross = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        inside = first + at < size
        value = tl.load(logit_ptr + first + at, mask=inside, other=low).to(tl.float32) - top
        wanted = tl.load(teacher_ptr + first + at, mask=inside, other=low).to(tl.float32) - teacher_top
        weight = tl.exp(wanted)
        total += tl.exp(value)
        teacher_total += weight
        # a token that neither can say counts nothing, where -inf - -inf would be NaN
        cross += tl.where(weight > 0, weight * (wanted - value), 0.0)
    whole, teacher_whole = tl.sum(total, 0), tl.sum(teacher_total, 0)
    tl.store(log_q_ptr + row, own - tl.log(whole))
    tl.store(kl_ptr + row, tl.sum(cross, 0) / teacher_whole - tl.log(teacher_whole) + tl.log(whole))
    apart = tl.zeros([BLOCK], tl.float32)
    signed = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        inside = first + at < size
        p = tl.exp(tl.load(logit_ptr + first + at, mask=inside, other=low).to(tl.float32) - top) / whole
        t = tl.exp(tl.load(teacher_ptr + first + at, mask=inside, other=low).to(tl.float32) - teacher_top) / teacher_whole
        apart += tl.abs(p - t)
        if SLOPE:
            signed += tl.where(p > t, p, tl.where(p < t, -p, 0.0))
        else:
            hard = p - (first + at == label)
            if WEIGHT:
                tl.store(teacher_ptr + first + at, (ce_scale * hard + kl_scale * (p - t)).to(teacher_ptr.dtype.element_ty), mask=inside)
            if ANCHORS:
                mixed = dpace_scale * hard + dpace_kl_scale * (p - t)
                tl.store(logit_ptr + first + at, mixed.to(logit_ptr.dtype.element_ty), mask=inside)
    tl.store(tv_ptr + row, tl.sum(apart, 0) / 2)
    if SLOPE:
        mean = tl.sum(signed, 0)
        for first in range(0, size, BLOCK):
            inside = first + at < size
            p = tl.exp(tl.load(logit_ptr + first + at, mask=inside, other=low).to(tl.float32) - top) / whole
            t = tl.exp(tl.load(teacher_ptr + first + at, mask=inside, other=low).to(tl.float32) - teacher_top) / teacher_whole
            sign = tl.where(p > t, 1.0, tl.where(p < t, -1.0, 0.0))
            hard = p - (first + at == label)
            mixed = ce_scale * hard + kl_scale * (p - t) + tv_scale / 2 * p * (sign - mean)
            tl.store(teacher_ptr + first + at, mixed.to(teacher_ptr.dtype.element_ty), mask=inside)
            if ANCHORS:
                mixed = dpace_scale * hard + dpace_kl_scale * (p - t)
                tl.store(logit_ptr + first + at, mixed.to(logit_ptr.dtype.element_ty), mask=inside)


def teacher_rows(logits: Tensor, wanted: Tensor, labels: Tensor, objective: LossConfig | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits and the teacher's logits [r, V], labels int64 [r] -> log probability of the label float32 [r], argmax int64 [r] (the first
    one), KL(teacher || drafter) and total variation float32 [r].

    With an objective the teacher's logits are overwritten with the gradient of its ce, kl and tv, and `logits` with that of its
    dpace and dpace_kl before D-PACE weighs it; neither where all of its kind are 0. Gradients are with respect to `logits`."""
    rows, size = logits.shape
    log_q, kl, tv = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    guess = torch.empty_like(labels)
    scales, flags = (0.0,) * 5, (False,) * 3
    if objective is not None:
        scales = objective.ce, objective.kl, objective.tv, objective.dpace, objective.dpace_kl
        flags = objective.by_weight, objective.by_anchors, objective.tv > 0
    block = min(4096, triton.next_power_of_2(size))
    warps = 16 if block == 4096 else 4
    _teacher_rows[(rows,)](logits, wanted, labels, log_q, guess, kl, tv, size, logits.stride(0), *scales, *flags, block, num_warps=warps)
    return log_q, guess, kl, tv
