"""TargetActor: one frozen target replica. It computes in one thread and sends in another, so that copies hide behind the next batch."""

from __future__ import annotations

import random
import time
from typing import Any

import ray
import torch

from dflash_ray.batch import Batch
from dflash_ray.processes import facts, set_threads
from dflash_ray.setup import RunSpec, load_run_target
from dflash_ray.transport import Payload, Remote, Sender


@ray.remote(concurrency_groups={"compute": 1, "send": 1, "ask": 1})
class TargetActor:
    def __init__(self, name: str, spec: RunSpec):
        self.name, self.spec = name, spec
        set_threads(spec.config.cpu.threads_per_actor)
        self.target = load_run_target(spec)
        self.sender = Sender(self.target.device)

    def __repr__(self) -> str:
        return self.name

    @ray.method(concurrency_group="ask")
    def describe(self) -> dict[str, Any]:
        return {**facts(), "kernels": vars(self.target.kernels)}

    @ray.method(concurrency_group="compute")
    def compute(self, position: int, batch: Batch) -> dict[str, Any]:
        """Computes the features of `batch` and holds them for `send`. Returns small facts about them."""
        set_threads(self.spec.config.cpu.threads_per_actor)
        self._delay(position)
        began = time.perf_counter()
        if self.spec.config.loss.needs_teacher:
            features, positions, rows = self.target.features_and_teacher(batch, self.spec.shape.block_size)
            tensors = {"features": features, "teacher_positions": torch.as_tensor(positions), "teacher_rows": rows}
        else:
            tensors = {"features": self.target.features(batch)}
        if tensors["features"].is_cuda:
            torch.cuda.current_stream().synchronize()  # the seconds below are the batch's, and deadlines are made of them
        self.sender.hold(position, tensors)
        seconds = time.perf_counter() - began
        return {
            "target": self.name,
            "seconds": seconds,
            "layer_ids": list(self.spec.shape.target_layer_ids),
        }

    @ray.method(num_returns=2, concurrency_group="send")
    def send(self, position: int) -> tuple[bool, Payload]:
        """(whether the payload lives in this actor's memory, payload). The caller awaits the first and only passes the second on."""
        payload = self.sender.take(position)
        return isinstance(payload["features"], Remote), payload

    @ray.method(concurrency_group="ask")
    def release(self, slot: int) -> None:
        """The drafter has copied what lay in `slot`."""
        self.sender.release(slot)

    def _delay(self, position: int) -> None:
        longest = self.spec.config.debug.target_delay_seconds
        if longest:
            time.sleep(random.Random(f"{self.spec.config.run.seed} {self.name} {position}").uniform(0, longest))
