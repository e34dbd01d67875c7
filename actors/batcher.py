"""BatcherActor: the run's plan, and the tokens of any batch of it."""

from __future__ import annotations

import ray

from dflash_ray.data.batches.batch import Batch, BatchInfo
from dflash_ray.machine.processes import Vitals, vitals
from dflash_ray.run.build import PlanInfo, open_batches
from dflash_ray.run.spec import RunSpec


@ray.remote
class BatcherActor:
    def __init__(self, spec: RunSpec):
        self.batches = open_batches(spec)

    def __repr__(self) -> str:
        return "batcher"

    def plan(self) -> PlanInfo:
        return self.batches.info

    def vitals(self) -> Vitals:
        return vitals()

    def fetch(self, wanted: list[tuple[str, int]]) -> tuple[list[BatchInfo], *tuple[Batch, ...]]:
        """What the coordinator must know of each (kind, batch number) of `wanted`, in one list, then the tokens of each. A kind is train or
        validation. Called with `num_returns` = 1 + their number, so that the caller looks at the list and passes the tokens on."""
        batches = [self.batches.batch(kind, number) for kind, number in wanted]
        return [BatchInfo.of(batch) for batch in batches], *batches
