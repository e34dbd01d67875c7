"""BatcherActor: the run's plan, and the tokens of any batch of it."""

from __future__ import annotations

from typing import Any

import ray

from dflash_ray.batch import Batch
from dflash_ray.processes import facts
from dflash_ray.setup import RunSpec, open_batches


@ray.remote
class BatcherActor:
    def __init__(self, spec: RunSpec):
        self.batches = open_batches(spec)

    def __repr__(self) -> str:
        return "batcher"

    def describe(self) -> dict[str, Any]:
        return self.batches.describe()

    def vitals(self) -> dict[str, Any]:
        return facts()

    @ray.method(num_returns=2)
    def batch(self, kind: str, number: int) -> tuple[dict[str, Any], Batch]:
        """(small facts, tokens) of batch `number` of the line `kind` (train or validation)."""
        batch = self.batches.batch(kind, number)
        return {
            "number": number,
            "epoch": batch.epoch,
            "tokens": batch.tokens,
            "allocated_tokens": batch.allocated_tokens,
            "documents": batch.documents,
            "supervised": int(batch.loss_mask.sum()),
            "anchors": int(batch.anchors.shape[0]),
            "bucket": batch.bucket,
            "sample_ids": batch.sample_ids.tolist(),
        }, batch
