"""The steps of the drafter's training pass that are no matmuls, each with its gradient, in plain torch.

`ops_for(device)` is the one place that chooses. The functions here are the twins that say what the Triton kernels must do; their gradients
come from autograd, so they share no formula with them. Rows are 2-D throughout; arithmetic is float32 or wider, results have the dtype of
the rows. What a function overwrites is said in its docstring.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_ray.draft.blocks.mask import Blocks
from dflash_ray.draft.dflash.attention import plain_attention

HeadViews = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q [A*K,N,D], k, v [A*K,M,D], k_context, v_context [T,M,D], or gradients of them


class Ops(NamedTuple):
    """The functions below, or their twins."""

    norm: Callable[..., tuple[Tensor, Tensor]]
    norm_backward: Callable[..., tuple[Tensor | None, Tensor]]
    swiglu: Callable[[Tensor], Tensor]
    swiglu_backward: Callable[[Tensor, Tensor], None]
    norm_rope: Callable[..., Tensor]
    norm_rope_backward: Callable[..., tuple[Tensor, Tensor]]
    spans: Callable[[Blocks, int | None], Any]
    attention: Callable[..., tuple[Tensor, Any]]
    attention_backward: Callable[..., None]


def ops_for(device: torch.device | str) -> Ops:
    """The fastest functions a device has."""
    return kernel_ops() if torch.device(device).type == "cuda" else PLAIN


def kernel_ops() -> Ops:
    """The Triton functions."""
    from dflash_ray.draft.kernels import attention, rows

    return Ops(
        rows.norm,
        rows.norm_backward,
        rows.swiglu,
        rows.swiglu_backward,
        rows.norm_rope,
        rows.norm_rope_backward,
        attention.Spans.of,
        attention.forward,
        attention.backward,
    )


def matmul(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """out = a @ b, or out += a @ b, where `out` may be wider than the factors.

    On a GPU that is one pass with sums kept in float32; elsewhere the result is rounded to the factors' dtype before it is added.
    """
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=int(add), out=out)
    elif not a.is_cuda:
        out.add_(a @ b) if add else out.copy_(a @ b)
    elif add:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def norm(x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [n, H], add [n, H] -> x + add in the dtype of x (x itself without `add`), and its norm: that / rms(that) * weight."""
    stream = x if add is None else x + add
    wide = stream.to(torch.promote_types(x.dtype, torch.float32))
    return stream, F.rms_norm(wide, weight.shape, weight.to(wide.dtype), eps).to(x.dtype)


def norm_backward(
    x: Tensor, weight: Tensor, eps: float, grad: Tensor, residual: Tensor | None = None, again: bool = True
) -> tuple[Tensor | None, Tensor]:
    """`grad` [n, H] of a norm's output is overwritten with the gradient of x, plus `residual`.

    Returns the norm's output once more (None unless `again`) and the gradient of the weight [H], float32 or wider."""
    with torch.enable_grad():
        leaf, scale = x.detach().requires_grad_(), weight.detach().requires_grad_()
        normed = norm(leaf, scale, eps)[1]
    x_grad, weight_grad = torch.autograd.grad(normed, (leaf, scale), grad)
    grad.copy_(x_grad if residual is None else x_grad + residual)
    return normed.detach() if again else None, weight_grad


def swiglu(both: Tensor) -> Tensor:
    """[n, 2I] gate beside up -> silu(gate) * up [n, I]."""
    gate, up = both.chunk(2, 1)
    return F.silu(gate) * up


def swiglu_backward(both: Tensor, grad: Tensor) -> None:
    """Overwrites `both` [n, 2I] with its gradient, and the output's gradient `grad` [n, I] with the output."""
    with torch.enable_grad():
        leaf = both.detach().clone().requires_grad_()
        out = swiglu(leaf)
    both.copy_(torch.autograd.grad(out, leaf, grad)[0])
    grad.copy_(out.detach())


def norm_rope(x: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, queries: int, keys: int, eps: float) -> Tensor:
    """x [n, C] with `queries` heads and then `keys` heads of size D in front -> [n, (queries + keys) * D], normalised and rotated.

    Weights [D], cos and sin [n, D/2]."""
    width = 2 * cos.shape[1]
    heads = x[:, : (queries + keys) * width].unflatten(1, (-1, width)).to(cos.dtype)
    weight = torch.cat([q_weight.expand(queries, -1), k_weight.expand(keys, -1)]).to(cos.dtype)
    first, second = (F.rms_norm(heads, (width,), None, eps) * weight).chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).flatten(1).to(x.dtype)


def norm_rope_backward(
    x: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, queries: int, keys: int, eps: float, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """The same columns of `grad` [n, C'], gradients of the result, are overwritten with those of x. Returns the weights' gradients [D]."""
    width = (queries + keys) * 2 * cos.shape[1]
    with torch.enable_grad():
        leaves = [part.detach().requires_grad_() for part in (x[:, :width], q_weight, k_weight)]
        out = norm_rope(*leaves, cos, sin, queries, keys, eps)
    x_grad, q_grad, k_grad = torch.autograd.grad(out, leaves, grad[:, :width])
    grad[:, :width] = x_grad
    return q_grad, k_grad


def attention(q: Tensor, k: Tensor, v: Tensor, k_context: Tensor, v_context: Tensor, blocks: Blocks, window: int | None):
    """`HeadViews` -> out [A*K, N, D], and what `attention_backward` wants to know of the softmax."""
    q, k, v = (part.unflatten(0, (-1, blocks.block_size)) for part in (q, k, v))
    return plain_attention(q, k, v, k_context, v_context, blocks, window).flatten(0, 1), None


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, k_context: Tensor, v_context: Tensor, blocks: Blocks, spans: int | None,
    out: Tensor, log: None, out_grad: Tensor, grads: HeadViews,
) -> None:  # fmt: skip
    """Writes into `grads` the gradients of the five inputs. `spans` is what `Ops.spans` made of the blocks and the window."""
    with torch.enable_grad():
        leaves = [part.detach().requires_grad_() for part in (q, k, v, k_context, v_context)]
        again, _ = attention(*leaves, blocks, spans)
    results = torch.autograd.grad(again, leaves, out_grad, allow_unused=True)
    for grad, result in zip(grads, results, strict=True):
        grad.zero_() if result is None else grad.copy_(result)


PLAIN = Ops(
    norm,
    norm_backward,
    swiglu,
    swiglu_backward,
    norm_rope,
    norm_rope_backward,
    lambda blocks, window: window,
    attention,
    attention_backward,
)
