"""DrafterActor: receives features in its own thread while it trains, and keeps the only state of the run that changes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch

from dflash_ray.data.batches.batch import Batch
from dflash_ray.draft.trainer import FeatureError, Staged
from dflash_ray.machine.processes import Vitals, set_threads, vitals
from dflash_ray.run.build import make_trainer
from dflash_ray.run.checkpoint import CheckpointMeta, read_checkpoint, save_checkpoint
from dflash_ray.run.rehearsal import rehearse_drafter
from dflash_ray.run.spec import RunSpec
from dflash_ray.transport.channel import Payload, Receiver, Remote
from dflash_ray.transport.peer import Buffer, see_all_gpus


@ray.remote(concurrency_groups={"train": 1, "stage": 1, "save": 1, "ask": 1})
class DrafterActor:
    def __init__(self, spec: RunSpec, total_steps: int):
        self.spec = spec
        if spec.device == "cuda":
            see_all_gpus()
        set_threads(spec.config.cpu.threads_per_actor)
        self.trainer = make_trainer(spec, total_steps)
        self.receiver = Receiver(torch.device(spec.device))
        self._staged: dict[int, Staged] = {}
        self._stager = ThreadPoolExecutor(1, "stager")  # the only thread that receives
        self._sums: Counter[str] = Counter()
        self._snapshot: tuple[dict[str, torch.Tensor], dict[str, Any]] | None = None

    def __repr__(self) -> str:
        return "drafter"

    def _enter(self) -> None:
        """At the start of what computes: Ray calls in threads of its own, which know neither torch's settings nor the CUDA context yet."""
        set_threads(self.spec.config.cpu.threads_per_actor)
        if self.receiver.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    @ray.method(concurrency_group="ask")
    def vitals(self) -> Vitals:
        return vitals()

    @ray.method(concurrency_group="train")
    def rehearse(self, tokens: int, anchors: int) -> None:
        """One micro-step at the run's largest sizes; what does not fit fails here and not hours later."""
        set_threads(self.spec.config.cpu.threads_per_actor)
        rehearse_drafter(self.trainer, tokens, anchors)

    @ray.method(concurrency_group="stage")
    def stage(self, position: int, layer_ids: list[int], batch: Batch, payload: Payload) -> str | None:
        """Copies the features of `position`, made of the layers `layer_ids`, to the device and checks them. Returns what is
        wrong with them, or None. PeerError where a target's buffer cannot be read."""
        return self._in_stager(self._stage, position, layer_ids, batch, payload)

    def _stage(self, position: int, layer_ids: list[int], batch: Batch, payload: Payload) -> str | None:
        self._enter()
        tensors = self.receiver.receive(payload)
        if layer_ids != list(self.spec.shape.target_layer_ids):
            return f"features of layers {layer_ids} instead of {list(self.spec.shape.target_layer_ids)}"
        teacher = (tensors["teacher_positions"].cpu().numpy(), tensors["teacher_rows"]) if "teacher_rows" in tensors else None
        try:
            self._staged[position] = self.trainer.stage(batch, tensors["features"], teacher)
        except FeatureError as error:
            return str(error)
        return None

    @ray.method(concurrency_group="stage")
    def probe(self, message: Remote) -> float:
        """Bytes per second of reading a target's buffer directly. PeerError where that does not work."""
        return self._in_stager(self.receiver.probe, message)

    @ray.method(concurrency_group="stage")
    def time_store(self, payload: Payload) -> None:
        """Copies what came through the object store to the device; the caller takes the time."""
        self._in_stager(self.receiver.receive, payload)

    @ray.method(concurrency_group="stage")
    def forget(self, buffers: list[Buffer]) -> None:
        """A target is gone: lets go of its memory."""
        self._in_stager(self.receiver.forget, buffers)

    def _in_stager(self, do: Callable[..., Any], *args: Any) -> Any:
        return self._stager.submit(do, *args).result()

    @ray.method(concurrency_group="train")
    def train(self, position: int) -> float:
        """One micro-step on the staged `position`. Returns its seconds."""
        self._enter()
        began = time.perf_counter()
        self._sums.update(self.trainer.train_staged(self._staged.pop(position)))
        if self.receiver.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # seconds, waits and credit tell of what is done, not of what is queued
        return time.perf_counter() - began

    @ray.method(concurrency_group="train")
    def train_group(self, group: list[tuple[int, list[int]]], *objects: Any) -> tuple[list[float], str | None]:
        """`stage` and `train` for each of `group`, one staged while another trains.

        group: position and layer ids of each; objects: batch and payload of each. Returns the seconds of each training, and what is wrong
        with the features behind the last one trained, or None.
        """
        messages = [(*head, *both) for head, *both in zip(group, objects[::2], objects[1::2], strict=True)]
        seconds: list[float] = []
        problem = self._in_stager(self._stage, *messages[0])
        for (position, *_), behind in zip(messages, [*messages[1:], None], strict=True):
            if problem is not None:
                break
            staging = self._stager.submit(self._stage, *behind) if behind else None
            seconds.append(self.train(position))
            problem = staging.result() if staging else None
        return seconds, problem

    @ray.method(concurrency_group="train")
    def step(self, step: int) -> dict[str, Any]:
        """The optimizer step numbered `step` (0-based) over the micro-steps since the last one. Returns its metrics."""
        outcome = self.trainer.optimizer_step(step)
        metrics = self.trainer.step_metrics(self._sums)
        self._sums = Counter()
        return {**metrics, **outcome}

    @ray.method(concurrency_group="train")
    def evaluate(self, position: int) -> dict[str, float]:
        """Validation sums of the staged `position`; changes nothing."""
        self._enter()
        return self.trainer.evaluate_staged(self._staged.pop(position))

    @ray.method(concurrency_group="train")
    def combine(self, sums: list[dict[str, float]]) -> dict[str, float]:
        """Metrics of a whole validation pass from the sums of its batches."""
        total: Counter[str] = Counter()
        for part in sums:
            total.update(part)
        return self.trainer.step_metrics(total)

    @ray.method(concurrency_group="train")
    def snapshot(self) -> None:
        """A copy of the state on the host, taken between two steps, so that it can be written while training goes on."""
        tensors, meta = self.trainer.state_dict()
        self._snapshot = ({name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}, meta)

    @ray.method(concurrency_group="save")
    def write(self, folder: Path, meta: CheckpointMeta) -> str:
        """Writes the snapshot as a checkpoint, with the trainer's part of `meta` filled in. OSError (disk full) leaves the earlier ones
        whole."""
        assert self._snapshot is not None
        (tensors, trainer_meta), self._snapshot = self._snapshot, None
        return str(save_checkpoint(folder, tensors, replace(meta, trainer=trainer_meta, shape=self.spec.shape.as_dict())))

    @ray.method(concurrency_group="train")
    def load(self, path: Path) -> CheckpointMeta:
        """Restores the state of a checkpoint. Returns its meta."""
        checkpoint = read_checkpoint(path)
        self.trainer.load_state_dict(checkpoint.tensors(), checkpoint.meta.trainer)
        self._staged.clear()
        self._sums = Counter()
        return checkpoint.meta
