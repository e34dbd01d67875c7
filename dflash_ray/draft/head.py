"""What the target's frozen head says about rows of the drafter's output, and the gradients with respect to these rows.

`[labels, V]` logits never exist whole. The head is frozen, so all that is wanted of it is the gradient at its input, and a chunk of rows
gives that at once: `(softmax - one_hot) @ head`. Forward and backward are one pass and nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_ray.config.schema import LossConfig
from dflash_ray.draft.dflash.ops import matmul
from dflash_ray.linear import linear, takes_onednn


@dataclass(frozen=True)
class HeadPass:
    """What the head says about R rows; gradients are with respect to the rows, each row at weight 1."""

    log_q: Tensor  # float32 [R] log probability of the label
    guess: Tensor  # int64 [R] argmax
    kl: Tensor | None  # float32 [R] KL(teacher || drafter)
    tv: Tensor | None  # float32 [R] total variation, in 0..1
    hard: Tensor | None  # [R, H] gradient of the label's cross-entropy
    by_weight: Tensor | None  # [R, H] gradient of ce, kl and tv, mixed as the objective says
    by_anchors: Tensor | None  # [R, H] gradient of cross-entropy and KL, mixed as its dpace and dpace_kl say


# (rows [R, H], head [V, H], tokens [R], teacher [R, H] or None, chunk, objective) -> HeadPass. Without an objective there are no gradients;
# without a teacher `hard` is the only one; with a teacher there are those of the mixtures that the objective has.
Head = Callable[[Tensor, Tensor, Tensor, Tensor | None, int, LossConfig | None], HeadPass]


def head_for(device: torch.device | str) -> Head:
    """The head pass for a device: the one place that chooses."""
    return kernel_head if torch.device(device).type == "cuda" else plain_head


@torch.no_grad()
def plain_head(rows: Tensor, head: Tensor, tokens: Tensor, teacher: Tensor | None, chunk: int, objective: LossConfig | None) -> HeadPass:
    """Plain torch: at most `chunk` rows of logits at a time, softmax in float32 or wider. `teacher` rows pass through the same head."""
    buffers = [_buffer(rows, head, chunk) for _ in range(1 if teacher is None else 2)]
    parts = []
    for low in range(0, len(rows), chunk):
        part = slice(low, low + chunk)
        label = tokens[part, None]
        p = _logits(rows[part], head, buffers[0])
        top, guess = p.max(1)
        log_q = p.gather(1, label)[:, 0] - top
        kl = tv = hard = None
        mixtures = [None, None]
        if teacher is not None:
            kl, tv, mixtures = _divergences(p, _logits(teacher[part], head, buffers[1]), label, objective)
            mixtures = [None if slope is None else linear(slope.to(rows.dtype), head.T).to(p.dtype) for slope in mixtures]
        total = p.sub_(top[:, None]).exp_().sum(1)
        log_q -= total.log()
        if teacher is None and objective is not None:
            # (p / total - one_hot) @ head, the division after the matmul: it then costs [r, H] instead of [r, V]
            p.scatter_add_(1, label, -total[:, None])
            hard = linear(p.to(rows.dtype), head.T).to(p.dtype) / total[:, None]
        parts.append((log_q, guess, kl, tv, hard, *mixtures))
    return HeadPass(*(None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)))


def _divergences(
    logits: Tensor, wanted: Tensor, label: Tensor, objective: LossConfig | None
) -> tuple[Tensor, Tensor, tuple[Tensor | None, Tensor | None]]:
    """KL(teacher || drafter) [r], total variation [r], and the gradients of both mixtures with respect to the drafter's logits [r, V].

    ce: drafter - one_hot. kl: drafter - teacher. tv = sum |p - t| / 2: p (s - sum p s) / 2 with s the sign of p - t.
    """
    log_p, log_t = logits.log_softmax(1), wanted.log_softmax(1)
    p, t = log_p.exp(), log_t.exp()
    kl, off = (t * (log_t - log_p)).sum(1), p - t
    tv = off.abs().sum(1) / 2
    if objective is None:
        return kl, tv, (None, None)
    sign = off.sign()
    slope = p * (sign - (p * sign).sum(1, keepdim=True))
    hard = p.scatter_add(1, label, torch.full_like(label, -1, dtype=p.dtype))
    by_weight = objective.ce * hard + objective.kl * off + (objective.tv / 2) * slope if objective.by_weight else None
    by_anchors = objective.dpace * hard + objective.dpace_kl * off if objective.by_anchors else None
    return kl, tv, (by_weight, by_anchors)


def _buffer(rows: Tensor, head: Tensor, chunk: int) -> Tensor:
    return rows.new_empty(min(chunk, len(rows)), len(head), dtype=torch.promote_types(rows.dtype, torch.float32))


def _logits(rows: Tensor, head: Tensor, buffer: Tensor) -> Tensor:
    """rows [r, H] -> logits [r, V], in the buffer where the matmul can write there: fresh memory costs as much as half of it on a CPU."""
    out = buffer[: len(rows)]
    if rows.dtype != out.dtype:
        return out.copy_(rows @ head.T)
    return linear(rows, head) if takes_onednn(rows, head) else torch.mm(rows, head.T, out=out)


@torch.no_grad()
def kernel_head(rows: Tensor, head: Tensor, tokens: Tensor, teacher: Tensor | None, chunk: int, objective: LossConfig | None) -> HeadPass:
    """Twin of `plain_head`, which it calls for float64. A kernel turns the logits of a chunk, in their own memory, into their gradient."""
    if rows.dtype == torch.float64:
        return plain_head(rows, head, tokens, teacher, chunk, objective)
    from dflash_ray.draft.kernels.softmax import softmax_rows, teacher_rows

    taught = teacher is not None
    buffers = [rows.new_empty(min(chunk, len(rows)), len(head)) for _ in range(1 + taught)]
    # what the buffers hold after a chunk, to be multiplied by the head
    wanted = [False, False] if objective is None else [objective.by_anchors, objective.by_weight] if taught else [True]
    wide = torch.promote_types(rows.dtype, torch.float32)
    gradients = [torch.empty(rows.shape, dtype=wide, device=rows.device) if want else None for want in wanted]
    parts = []
    for low in range(0, len(rows), chunk):
        part = slice(low, min(low + chunk, len(rows)))
        logits = [buffer[: part.stop - low] for buffer in buffers]
        for source, out in zip((rows, teacher), logits, strict=False):
            torch.mm(source[part], head.T, out=out)
        if taught:
            parts.append(teacher_rows(*logits, tokens[part], objective))
        else:
            parts.append(softmax_rows(*logits, tokens[part], objective is not None))
        for slopes, gradient in zip(logits, gradients, strict=False):
            if gradient is not None:
                matmul(slopes, head, gradient[part])
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    if taught:
        by_anchors, by_weight = gradients
        return HeadPass(*columns, None, by_weight, by_anchors)
    log_q, guess, total = columns
    hard = None if objective is None else gradients[0].div_(total[:, None])
    return HeadPass(log_q, guess, None, None, hard, None, None)
