"""BatcherActor: the run's plan, and the tokens of any batch of it."""

from __future__ import annotations

from typing import Any

import ray

from dflash_ray.data.batches.batch import Batch
from dflash_ray.machine.processes import facts
from dflash_ray.run.build import open_batches
from dflash_ray.run.spec import RunSpec


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

    def fetch(self, wanted: list[tuple[str, int]]) -> tuple[list[dict[str, Any]], *tuple[Batch, ...]]:
        """Small facts of every (line, batch number) of `wanted` in one list, then the tokens of each. A line is train or validation.
        Called with `num_returns` = 1 + their number, so that the caller looks at the facts and passes the tokens on."""
        batches = [self.batches.batch(kind, number) for kind, number in wanted]
        return [_facts(batch) for batch in batches], *batches


def _facts(batch: Batch) -> dict[str, Any]:
    return {
        "number": batch.number,
        "epoch": batch.epoch,
        "tokens": batch.tokens,
        "allocated_tokens": batch.allocated_tokens,
        "documents": batch.documents,
        "supervised": int(batch.loss_mask.sum()),
        "anchors": int(batch.anchors.shape[0]),
        "bucket": batch.bucket,
        "sample_ids": batch.sample_ids.tolist(),
    }
