"""How much of the supervised text is the target's own: the share of supervised tokens that are its argmax at their place.

A drafter learns to predict the target, so it should be trained on what the target says. Greedy answers give 1.00 in float32, sampled ones
less; text by another author often lies under 0.5, and a drafter trained on it is accepted less than it could be.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from dflash_ray.data.batches.batch import Batch
from dflash_ray.data.prepare.tokenizer import ChatTokenizer
from dflash_ray.data.store.dataset import Dataset, Sample, open_dataset
from dflash_ray.target.load import load_target
from dflash_ray.target.model import FrozenTarget

_TOKENS = 1024  # of a sample that are looked at
_ROWS_LOOKED_AT = 1024  # to find samples of both kinds
_HEAD_ROWS = 256  # logits that exist at one time


@dataclass(frozen=True)
class Share:
    """`agree` of `tokens` supervised tokens in `samples` samples."""

    samples: int = 0
    tokens: int = 0
    agree: int = 0

    @property
    def share(self) -> float | None:
        return round(self.agree / self.tokens, 4) if self.tokens else None

    def __add__(self, other: Share) -> Share:
        return Share(self.samples + other.samples, self.tokens + other.tokens, self.agree + other.agree)


def on_policy(target: FrozenTarget, data: Dataset, think_end: int | None, samples: int = 32) -> dict[str, Any]:
    """Shares over up to `samples` samples each with and without reasoning, spread over `data`, and over both.

    `target` has its head. `think_end` is the token that ends a think block, None where the tokenizer has none.
    """
    parts = {"with_thinking": Share(), "without_thinking": Share()}
    rows = np.unique(np.linspace(0, len(data) - 1, _ROWS_LOOKED_AT).astype(int))
    for row in np.random.default_rng(0).permutation(rows):
        sample = data.read([row])[0]
        thinks = think_end is not None and bool(((sample.input_ids == think_end) & (sample.loss_mask == 1)).any())
        kind = "with_thinking" if thinks else "without_thinking"
        if parts[kind].samples < samples:
            parts[kind] += agreement(target, sample)
        if all(part.samples == samples for part in parts.values()):
            break
    both = parts["with_thinking"] + parts["without_thinking"]
    return {"samples": both.samples, "share": both.share, **{name: vars(part) | {"share": part.share} for name, part in parts.items()}}


@torch.inference_mode()
def agreement(target: FrozenTarget, sample: Sample) -> Share:
    """Of one sample, cut to its first tokens."""
    ids, mask = sample.input_ids[:_TOKENS], sample.loss_mask[:_TOKENS]
    labels = np.flatnonzero(mask[1:]) + 1
    if len(labels) == 0:
        return Share(1)
    anchors = (labels - 1).astype(np.int32)
    batch = Batch(0, 0, np.zeros(1, np.int64), ids, np.array([0, len(ids)], np.int32), mask, anchors)
    _, positions, rows = target.features_and_teacher(batch, block_size=2)
    assert np.array_equal(positions, anchors), "a block of two has its anchor as its one teacher position"
    chosen = torch.cat([F.linear(part, target.head).argmax(-1) for part in rows.split(_HEAD_ROWS)])
    return Share(1, len(labels), int((chosen.cpu().numpy() == ids[labels]).sum()))


def check_target(path: Path, data: Path, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """`on_policy` of the target in folder `path` over the training split of the data set in folder `data`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = load_target(path, taps=None, device=device, with_head=True)
    return on_policy(target, open_dataset(data), tokenizer.token_id("</think>"))
