"""TargetActor: one frozen target replica. Batches in, features out, as numpy views that the caller owns."""

from __future__ import annotations

import random
import time
from typing import Any

import ray
import torch

from dflash_ray.batch import Batch
from dflash_ray.payload import Packed, pack
from dflash_ray.processes import facts, set_threads
from dflash_ray.setup import RunSpec, load_run_target


@ray.remote(concurrency_groups={"compute": 1, "ask": 1})
class TargetActor:
    def __init__(self, name: str, spec: RunSpec):
        self.name, self.spec = name, spec
        set_threads(spec.config.cpu.threads_per_actor)
        self.target = load_run_target(spec)

    def __repr__(self) -> str:
        return self.name

    @ray.method(concurrency_group="ask")
    def describe(self) -> dict[str, Any]:
        return facts()

    @ray.method(num_returns=2, concurrency_group="compute")
    def compute(self, position: int, batch: Batch) -> tuple[dict[str, Any], dict[str, Packed]]:
        """Features of `batch`: small facts first, so that the caller awaits them alone; then the payload, which it only passes on."""
        set_threads(self.spec.config.cpu.threads_per_actor)
        self._delay(position)
        began = time.perf_counter()
        with torch.inference_mode():
            if self.spec.config.loss.needs_teacher:
                features, positions, rows = self.target.features_and_teacher(batch, self.spec.shape.block_size)
                tensors = {"features": features, "teacher_positions": torch.as_tensor(positions), "teacher_rows": rows}
            else:
                tensors = {"features": self.target.features(batch)}
            payload = {name: pack(tensor.cpu()) for name, tensor in tensors.items()}
        seconds = time.perf_counter() - began
        nbytes = sum(packed.data.nbytes for packed in payload.values())
        return {"target": self.name, "seconds": seconds, "nbytes": nbytes, "layer_ids": list(self.spec.shape.target_layer_ids)}, payload

    def _delay(self, position: int) -> None:
        longest = self.spec.config.debug.target_delay_seconds
        if longest:
            time.sleep(random.Random(f"{self.spec.config.run.seed} {self.name} {position}").uniform(0, longest))
