"""Losses of a micro-step and their gradients with respect to the drafter's output.

The frozen head gives each row's gradient at weight 1 (`head`). A row's weight scales its gradient, so the D-PACE weights, which need the
probabilities of a whole block, are applied after the head has seen all rows.

Sums and gradients are not normalised here. ce, kl and tv are divided by the weight sum of the whole optimizer step, dpace and dpace_kl by
its valid anchors, and neither is known before the step's last batch; so each of the two kinds has a gradient of its own (see `trainer`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_ray.config.schema import LossConfig
from dflash_ray.draft.async_scalars import AsyncScalars
from dflash_ray.draft.blocks.labels import Labels, dpace_weights
from dflash_ray.draft.head import HeadPass, head_for
from dflash_ray.draft.replay import PASSES, TOKENS

WEIGHT, ANCHORS = "weight", "anchors"  # the two divisors, names of sums


class Losses:
    """Of one micro-step: unnormalised gradients [R, H] by divisor, leading matches int [A] of each block, and sums that add up over
    batches."""

    def __init__(self, gradients: dict[str, Tensor], matches: Tensor, counts: dict[str, float], totals: dict[str, Tensor]) -> None:
        self.gradients, self.matches = gradients, matches
        self._counts, self._names = counts, list(totals)
        self._totals = AsyncScalars(torch.stack([value.double() for value in totals.values()]))

    @property
    def sums(self) -> dict[str, float]:
        """Waits for the device: read it after everything else is queued."""
        return self._counts | dict(zip(self._names, self._totals.wait(), strict=True))


def block_losses(
    rows: Tensor, head: Tensor, labels: Labels, config: LossConfig, chunk: int, teacher: Tensor | None = None, gradients: bool = True
) -> Losses:
    """Drafter output rows [R, H] at the label slots, head [V, H], teacher rows [R, H] where the config needs them (dflash.md, objectives).

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
