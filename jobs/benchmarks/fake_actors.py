"""Actors that answer at once and compute nothing: what is left of a run with them is what the coordinator costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import ray

from actors.coordinator.run_state import ActorClasses
from dflash_ray.data.batches.batch import BatchInfo
from dflash_ray.machine.processes import Vitals, vitals
from dflash_ray.run.build import PlanInfo
from dflash_ray.run.checkpoint import CheckpointMeta
from dflash_ray.transport.features import FeaturesInfo

TOKENS = 64  # per batch


class _Fake:
    """What all of them are asked."""

    def vitals(self) -> Vitals:
        return vitals()


@ray.remote
class FakeBatcher(_Fake):
    def __init__(self, spec: Any):
        self.batches = spec.config.data.samples

    def plan(self) -> PlanInfo:
        count = self.batches
        return PlanInfo(count, count * TOKENS, count, 0, plan="fake", dataset="fake", most_tokens=TOKENS, most_anchors=1)

    def fetch(self, wanted: list[tuple[str, int]]) -> tuple[list[BatchInfo], *tuple[np.ndarray, ...]]:
        sizes = {"tokens": TOKENS, "allocated_tokens": TOKENS, "documents": 1, "supervised": TOKENS, "anchors": 1, "bucket": -1}
        infos = [BatchInfo(number=number, epoch=0, sample_ids=[number], **sizes) for _, number in wanted]
        return infos, *(np.zeros(TOKENS, dtype=np.int32) for _ in wanted)


@ray.remote(concurrency_groups={"compute": 1, "send": 1, "ask": 1})
class FakeTarget(_Fake):
    def __init__(self, name: str, _spec: Any):
        self.name = name

    def __repr__(self) -> str:
        return self.name

    @ray.method(concurrency_group="compute")
    def rehearse(self, _tokens: int, _anchors: int) -> None:
        pass

    @ray.method(num_returns=2, concurrency_group="compute")
    def compute(self, _position: int, _kind: str, _batch: np.ndarray, _with_sketch: bool) -> tuple[FeaturesInfo, np.ndarray]:
        return FeaturesInfo(self.name, seconds=1e-3, layer_ids=[], sent=True), np.zeros(TOKENS, dtype=np.int16)


@ray.remote(concurrency_groups={"train": 1, "stage": 1, "save": 1, "ask": 1})
class FakeDrafter(_Fake):
    def __init__(self, _spec: Any, _total_steps: int):
        pass

    @ray.method(concurrency_group="train")
    def rehearse(self, _tokens: int, _anchors: int) -> None:
        pass

    @ray.method(concurrency_group="stage")
    def stage(self, _position: int, _layer_ids: list[int], _batch: np.ndarray, _payload: np.ndarray) -> None:
        pass

    @ray.method(concurrency_group="train")
    def train(self, _position: int) -> float:
        return 1e-4

    @ray.method(concurrency_group="train")
    def train_group(self, group: list[tuple[int, list[int]]], *_objects: np.ndarray) -> tuple[list[float], None]:
        return [1e-4] * len(group), None

    @ray.method(concurrency_group="train")
    def step(self, _step: int) -> dict[str, Any]:
        means = dict.fromkeys(("loss", "ce", "dpace", "accuracy", "tau", "tau_blocks", "supervised_tokens_covered", "grad_norm"), 1.0)
        return {**means, "slot_accuracy": [], "lr": 1e-4, "noise_std": 0.0, "skipped": None}

    @ray.method(concurrency_group="train")
    def snapshot(self) -> None:
        pass

    @ray.method(concurrency_group="save")
    def write(self, folder: Any, meta: CheckpointMeta) -> str:
        return str(folder / f"step-{meta.step:08d}")


FAKES = ActorClasses(FakeBatcher, FakeTarget, FakeDrafter)
