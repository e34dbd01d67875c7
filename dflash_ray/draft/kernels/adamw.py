"""AdamW in one pass over a parameter: division by the step's weight, clipping, moments, update, and the bf16 copy that matmuls read.

30 bytes per parameter move, which is all that has to; torch's fused AdamW after separate passes for scaling and copying moves 42.
The arithmetic is torch's. A norm that is not finite changes nothing, so nobody has to wait for it before the update is queued.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _adamw(
    value_ptr, grad_ptr, mean_ptr, square_ptr, copy_ptr, norm_ptr, size,
    scale, clip, lr, decay, beta1, beta2, eps, correction1, correction2, COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    norm = tl.load(norm_ptr)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < tl.where(norm < float("inf"), size, 0)  # nothing, also where it is NaN
    scale = scale * tl.minimum(1.0, clip / (norm + 1e-12))
    grad = tl.load(grad_ptr + at, mask=mask, other=0.0) * scale
    value = tl.load(value_ptr + at, mask=mask, other=0.0)
    mean = tl.load(mean_ptr + at, mask=mask, other=0.0)
    square = tl.load(square_ptr + at, mask=mask, other=0.0)
    value -= lr * decay * value
    mean += (1 - beta1) * (grad - mean)
    square = beta2 * square + (1 - beta2) * grad * grad
    value -= lr / correction1 * mean / (tl.sqrt(square) / correction2 + eps)
    tl.store(value_ptr + at, value, mask=mask)
    tl.store(mean_ptr + at, mean, mask=mask)
    tl.store(square_ptr + at, square, mask=mask)
    if COPY:
        tl.store(copy_ptr + at, value.to(copy_ptr.dtype.element_ty), mask=mask)


def adamw(
    value: Tensor, grad: Tensor, mean: Tensor, square: Tensor, copy: Tensor | None, norm: Tensor, *,
    scale: float, clip: float, lr: float, decay: float, betas: tuple[float, float], eps: float, step: int,
) -> None:  # fmt: skip
    """One update of contiguous float32 tensors from `scale` x grad, clipped by `norm` (float32 [], the norm of all scaled gradients).

    `step` counts from 1. `copy` of any dtype takes the new value. Nothing changes where `norm` is not finite.
    """
    size = value.numel()
    corrections = 1 - betas[0] ** step, (1 - betas[1] ** step) ** 0.5
    _adamw[(triton.cdiv(size, _BLOCK),)](
        value, grad, mean, square, value if copy is None else copy, norm, size,
        scale, clip, lr, decay, *betas, eps, *corrections, copy is not None, _BLOCK, num_warps=8,
    )  # fmt: skip
