"""Losses of a micro-step and their gradients with respect to the drafter's output, without `[labels, V]` logits ever existing whole.

The head is frozen, so all that is wanted of it is the gradient at its input. A chunk of label rows gives that at once:
`(softmax - one_hot) @ head`; forward and backward are one pass and nothing is computed twice. A row's weight scales its gradient, so the
D-PACE weights, which need the probabilities of a whole block, are applied after all chunks.

Sums and gradients are not normalised here. ce, kl and tv are divided by the weight sum of the whole optimizer step, dpace and dpace_kl by
its valid anchors, and neither is known before the step's last batch; so each of the two kinds has a gradient of its own (see `trainer`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_ray.config.schema import LossConfig
from dflash_ray.draft.async_scalars import Reading
from dflash_ray.draft.blocks.labels import Labels, dpace_weights
from dflash_ray.draft.replay import PASSES, TOKENS
from dflash_ray.linear import linear, takes_onednn

WEIGHT, ANCHORS = "weight", "anchors"  # the two divisors, names of sums


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
    if torch.device(device).type != "cuda":
        return plain_head
    from dflash_ray.draft.kernels.softmax import triton_head

    return triton_head


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
            # (p / total - one_hot) @ head, the division after the product: it then costs [r, H] instead of [r, V]
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
    """rows [r, H] -> logits [r, V], in the buffer where the product can write there: fresh memory costs as much as half of it on a CPU."""
    out = buffer[: len(rows)]
    if rows.dtype != out.dtype:
        return out.copy_(rows @ head.T)
    return linear(rows, head) if takes_onednn(rows, head) else torch.mm(rows, head.T, out=out)


class Losses:
    """Of one micro-step: unnormalised gradients [R, H] by divisor, leading matches int [A] of each block, and sums that add up over
    batches."""

    def __init__(self, gradients: dict[str, Tensor], matches: Tensor, counts: dict[str, float], totals: dict[str, Tensor]) -> None:
        self.gradients, self.matches = gradients, matches
        self._counts, self._names = counts, list(totals)
        self._reading = Reading(torch.stack([value.double() for value in totals.values()]))

    @property
    def sums(self) -> dict[str, float]:
        """Waits for the device: read it after everything else is queued."""
        return self._counts | dict(zip(self._names, self._reading.read(), strict=True))


def block_losses(
    rows: Tensor, head: Tensor, labels: Labels, config: LossConfig, chunk: int, teacher: Tensor | None = None, gradients: bool = True
) -> Losses:
    """Drafter output rows [R, H] at the label slots, head [V, H], teacher rows [R, H] where the objective needs them (dflash.md, loss).

    Sums: the counts of `Labels.of`; `ce`, `kl`, `tv` weighted by decay, `dpace`, `dpace_kl` as D-PACE does; `correct` and `slot_correct.k`
    (argmax equals the label); `tau` (leading matches + 1 of complete blocks).
    """
    seen = head_for(rows.device)(rows, head, labels.tokens, teacher, chunk, config if gradients else None)
    decay = labels.decay.to(seen.log_q.dtype)
    pace = dpace_weights(seen.log_q, labels, config.alpha)
    correct = seen.guess == labels.tokens
    matches = labels.grid(correct.int(), 0).cumprod(1).sum(1)
    totals = {
        "ce": -(decay * seen.log_q).sum(),
        "dpace": -(pace * seen.log_q).sum(),
        "correct": correct.sum(),
        "tau": ((matches + 1) * labels.complete).sum(),
    }
    if config.needs_teacher:
        totals |= {"kl": (decay * seen.kl).sum(), "tv": (decay * seen.tv).sum(), "dpace_kl": (pace * seen.kl).sum()}
    totals |= {f"slot_correct.{k}": total for k, total in enumerate(labels.grid(correct.int(), 0).sum(0), start=1)}
    return Losses(_gradients(seen, rows.dtype, decay, pace, config) if gradients else {}, matches, empty_sums(labels), totals)


def _gradients(seen: HeadPass, dtype: torch.dtype, decay: Tensor, pace: Tensor, config: LossConfig) -> dict[str, Tensor]:
    """Row weights times row gradients, one result per divisor that has a positive weight."""
    out = {}
    if config.by_weight:
        out[WEIGHT] = (seen.hard * (config.ce * decay)[:, None] if seen.hard is not None else seen.by_weight * decay[:, None]).to(dtype)
    if config.by_anchors:
        out[ANCHORS] = (seen.hard * (config.dpace * pace)[:, None] if seen.hard is not None else seen.by_anchors * pace[:, None]).to(dtype)
    return out


def empty_sums(labels: Labels) -> dict[str, float]:
    """The sums of a batch that the drafter has not looked at: its counts, and 0 for everything else."""
    slots = (f"slot_correct.{k}" for k in range(1, labels.block_size))
    zeros = ["ce", "dpace", "kl", "tv", "dpace_kl", "correct", "tau", TOKENS, PASSES, *slots]
    return dict.fromkeys(zeros, 0.0) | labels.counts


def step_metrics(sums: dict[str, float], config: LossConfig, block_size: int) -> dict[str, float | list[float]]:
    """Means of summed sums; what has nothing to divide by is 0.

    `loss` is the mixture that is trained. `tau` is the mean over complete blocks of leading matches + 1, `tau_blocks` the share of such
    blocks among the anchors with a label, `supervised_tokens_covered` the share of supervised tokens that are the label of some slot.
    `replay_tau`, of a validation with a block at every place: what serving would gain (see `replay`).
    """

    def share(part: float, whole: str) -> float:
        return part / sums[whole] if sums[whole] else 0.0

    by_weight = config.ce * sums["ce"] + config.kl * sums["kl"] + config.tv * sums["tv"]
    by_anchors = config.dpace * sums["dpace"] + config.dpace_kl * sums["dpace_kl"]
    return {
        "loss": share(by_weight, WEIGHT) + share(by_anchors, ANCHORS),
        "ce": share(sums["ce"], WEIGHT),
        "dpace": share(sums["dpace"], ANCHORS),
        **({"kl": share(sums["kl"], WEIGHT), "tv": share(sums["tv"], WEIGHT)} if config.needs_teacher else {}),
        **({"dpace_kl": share(sums["dpace_kl"], ANCHORS)} if config.dpace_kl else {}),
        "accuracy": share(sums["correct"], "labels"),
        "tau": share(sums["tau"], "blocks"),
        **({"replay_tau": sums[TOKENS] / sums[PASSES]} if sums.get(PASSES) else {}),
        "tau_blocks": share(sums["blocks"], ANCHORS),
        "supervised_tokens_covered": share(sums["covered"], "supervised"),
        "slot_accuracy": [share(sums[f"slot_correct.{k}"], f"slot_labels.{k}") for k in range(1, block_size)],
    }
