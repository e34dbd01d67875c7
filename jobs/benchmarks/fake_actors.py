"""Actors that answer at once and compute nothing: what is left of a run with them is what the coordinator costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import ray

from actors.coordinator.run_state import Crew
from dflash_ray.machine.processes import facts

TOKENS = 64  # per batch


class _Fake:
    """What all of them are asked."""

    def describe(self) -> dict[str, Any]:
        return facts()

    def vitals(self) -> dict[str, Any]:
        return facts()


@ray.remote
class FakeBatcher(_Fake):
    def __init__(self, spec: Any):
        self.batches = spec.config.data.samples

    def describe(self) -> dict[str, Any]:
        sizes = {"samples": self.batches, "batches": self.batches, "tokens": self.batches * TOKENS, "most_tokens": TOKENS}
        return sizes | {"most_anchors": 1, "validation_batches": 0, "plan": "fake", "dataset": "fake"}

    def fetch(self, wanted: list[tuple[str, int]]) -> tuple[list[dict[str, Any]], *tuple[np.ndarray, ...]]:
        sizes = {"tokens": TOKENS, "allocated_tokens": TOKENS, "documents": 1, "supervised": TOKENS, "anchors": 1, "bucket": -1}
        batches = [{"number": number, "epoch": 0, "sample_ids": [number], **sizes} for _, number in wanted]
        return batches, *(np.zeros(TOKENS, dtype=np.int32) for _ in wanted)


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
    def compute(self, _position: int, _kind: str, _batch: np.ndarray, _with_sketch: bool) -> tuple[dict[str, Any], np.ndarray]:
        return {"target": self.name, "seconds": 1e-3, "layer_ids": [], "sent": True}, np.zeros(TOKENS, dtype=np.int16)


@ray.remote(concurrency_groups={"train": 1, "stage": 1, "save": 1, "ask": 1})
class FakeDrafter(_Fake):
    def __init__(self, _spec: Any, _total_steps: int):
        pass

    @ray.method(concurrency_group="train")
    def rehearse(self, _tokens: int, _anchors: int) -> None:
        pass

    @ray.method(concurrency_group="stage")
    def stage(self, _position: int, _meta: dict[str, Any], _batch: np.ndarray, _payload: np.ndarray) -> None:
        pass

    @ray.method(concurrency_group="train")
    def train(self, _position: int) -> float:
        return 1e-4

    @ray.method(concurrency_group="train")
    def train_line(self, line: list[tuple[int, dict[str, Any]]], *_objects: np.ndarray) -> tuple[list[float], None]:
        return [1e-4] * len(line), None

    @ray.method(concurrency_group="train")
    def step(self, _step: int) -> dict[str, Any]:
        return {"loss": 1.0, "accuracy": 0.5, "tau": 2.0, "lr": 1e-4, "noise_std": 0.0}

    @ray.method(concurrency_group="train")
    def snapshot(self) -> None:
        pass

    @ray.method(concurrency_group="save")
    def write(self, folder: Any, meta: dict[str, Any]) -> str:
        return str(folder / f"step-{meta['step']:08d}")


FAKES = Crew(FakeBatcher, FakeTarget, FakeDrafter)
