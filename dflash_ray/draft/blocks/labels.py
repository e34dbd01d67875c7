"""Which slots have a label, and what each label weighs.

Slot k of a block predicts the token at anchor + k; slot 0 has none. A label counts if it lies in the anchor's own document and is
supervised. Everything here follows from the batch alone, so it is known before the features arrive.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_ray.config.schema import LossConfig
from dflash_ray.data.batches.batch import Batch

_GAMMAS = ((0, 4, 8, 10, 16, 64), (0, 2, 4, 5, 7, 28))  # block sizes and their default gamma; 8, 10 and 16 are published


@dataclass(frozen=True)
class Labels:
    """R labels of A blocks, ordered by anchor and then by slot."""

    slots: Tensor  # int64 [R] anchor * K + slot, an index into A*K
    tokens: Tensor  # int64 [R] the label
    decay: Tensor  # float64 [R] exp(-(slot - 1) / gamma)
    positions: np.ndarray  # int64 [R] index in the batch of the token before the label: where the teacher's row stands
    block_size: int
    anchors: int  # A
    complete: Tensor  # bool [A] all K-1 labels are there
    counts: dict[str, float]  # sums that the batch alone decides, see `Labels.of`

    @property
    def count(self) -> int:
        return len(self.positions)

    @classmethod
    def of(cls, batch: Batch, block_size: int, gamma: float, device: torch.device | str = "cpu") -> Labels:
        """Labels of a batch. Its counts: `weight` (sum of decay), `anchors` (blocks with a label), `blocks` (complete ones), `labels`,
        `slot_labels.k`, `supervised` (tokens) and `covered` (supervised tokens that are the label of some slot)."""
        cu = batch.cu_seqlens.astype(np.int64)
        anchors = batch.anchors.astype(np.int64)
        ends = cu[np.searchsorted(cu, anchors, side="right")]
        places = anchors[:, None] + np.arange(block_size)
        inside = places < ends[:, None]
        counts = inside & (batch.loss_mask[np.where(inside, places, 0)] == 1)
        counts[:, 0] = False
        anchor, slot = np.nonzero(counts)
        labels = places[anchor, slot]
        decay = np.exp(-(slot - 1) / gamma)

        def tensor(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

        return cls(
            slots=tensor(anchor * block_size + slot),
            tokens=tensor(batch.input_ids.astype(np.int64)[labels]),
            decay=tensor(decay),
            positions=labels - 1,
            block_size=block_size,
            anchors=len(anchors),
            complete=tensor(counts[:, 1:].all(1)),
            counts={
                "weight": float(decay.sum()),
                "anchors": float(counts.any(1).sum()),
                "blocks": float(counts[:, 1:].all(1).sum()),
                "labels": float(len(labels)),
                "supervised": float((batch.loss_mask == 1).sum()),
                "covered": float(len(np.unique(labels))),
                **{f"slot_labels.{k}": float(counts[:, k].sum()) for k in range(1, block_size)},
            },
        )

    def grid(self, values: Tensor, missing: float) -> Tensor:
        """values [R] -> [A, K-1], slot 1 first, `missing` where there is no label."""
        out = values.new_full((self.anchors * self.block_size,), missing)
        out[self.slots] = values
        return out.view(self.anchors, self.block_size)[:, 1:]


def decay_gamma(loss: LossConfig, block_size: int) -> float:
    """`loss.gamma`, or the default of the block size: 4 for 8, 5 for 10, 7 for 16, straight lines between."""
    return loss.gamma or float(np.interp(block_size, *_GAMMAS))


def dpace_weights(log_q: Tensor, labels: Labels, alpha: float) -> Tensor:
    """Weights [R] of D-PACE from the labels' log probabilities [R] (dflash.md, objectives): the expected length that still hangs on a slot.

    s = alpha q + 1 - alpha; prefix_k = s_1 ... s_k; w_k = sum of prefix_m over labelled m >= k. A slot without a label is factor 1 in the
    prefix and 0 in the sum.
    """
    prefix = labels.grid(alpha * log_q.exp() + (1 - alpha), 1.0).cumprod(1)
    prefix = prefix * labels.grid(torch.ones_like(log_q), 0.0)
    suffix = prefix.flip(1).cumsum(1).flip(1)
    return torch.nn.functional.pad(suffix, (1, 0)).flatten()[labels.slots]
