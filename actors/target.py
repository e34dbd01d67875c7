"""TargetActor: one frozen target replica. It computes in one thread and sends in another, so that copies hide behind the next batch."""

from __future__ import annotations

import os
import random
import signal
import time

import numpy as np
import ray
import torch

from dflash_ray.data.batches.batch import Batch
from dflash_ray.machine.processes import Vitals, set_threads, vitals
from dflash_ray.run.build import load_run_target
from dflash_ray.run.rehearsal import rehearse_target
from dflash_ray.run.spec import RunSpec
from dflash_ray.transport.channel import Payload, Remote, Sender, slot_of
from dflash_ray.transport.features import FeaturesInfo
from dflash_ray.transport.peer import Buffer, PeerError
from dflash_ray.transport.sketch import sketch


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
    def vitals(self) -> Vitals:
        return vitals(kernels=vars(self.target.kernels))

    @ray.method(concurrency_group="compute")
    def rehearse(self, tokens: int, anchors: int) -> None:
        """The run's largest sizes once; what does not fit fails here and not hours later."""
        set_threads(self.spec.config.cpu.threads_per_actor)
        rehearse_target(self.target, tokens, anchors, self.spec.shape.block_size, teacher=self.spec.config.loss.needs_teacher)

    @ray.method(num_returns=2, concurrency_group="compute")
    def compute(self, position: int, kind: str, batch: Batch, with_sketch: bool) -> tuple[FeaturesInfo, Payload | None]:
        """Computes the features of `batch`. Returns what there is to say of them, and themselves if `sent` says so; else they are held for
        `send`, which copies them from the device while the next batch is computed."""
        set_threads(self.spec.config.cpu.threads_per_actor)
        self._delay(position)
        began = time.perf_counter()
        if self.spec.config.loss.needs_teacher:
            features, positions, rows = self.target.features_and_teacher(batch, self.spec.shape.block_size)
            tensors = {"features": features, "teacher_positions": torch.as_tensor(positions), "teacher_rows": rows}
        else:
            tensors = {"features": self.target.features(batch)}
        self._spoil(kind, batch, tensors)
        if tensors["features"].is_cuda:
            torch.cuda.current_stream().synchronize()  # the seconds below are the batch's, and deadlines are made of them
        self.sender.hold(position, tensors)
        seconds = time.perf_counter() - began
        sent = not tensors["features"].is_cuda
        layer_ids = list(self.spec.shape.target_layer_ids)
        seen = sketch(tensors["features"], len(layer_ids)) if with_sketch else None
        return FeaturesInfo(self.name, seconds, layer_ids, sent, seen), self.sender.take(position) if sent else None

    @ray.method(concurrency_group="compute")
    def sketch(self, batch: Batch) -> np.ndarray:
        """What this target's features of `batch` look like, for comparison with another's."""
        set_threads(self.spec.config.cpu.threads_per_actor)
        tensors = {"features": self.target.features(batch)}
        self._spoil("sketch", batch, tensors)
        return sketch(tensors["features"], len(self.spec.shape.target_layer_ids))

    @ray.method(num_returns=2, concurrency_group="send")
    def send(self, position: int) -> tuple[int | None, Payload]:
        """(the slot of this actor's memory that the payload lies in, or None; payload). The caller awaits the first, passes the second
        on, and calls `release` with the slot when the features are no longer needed."""
        payload = self.sender.take(position)
        return slot_of(payload), payload

    @ray.method(concurrency_group="ask")
    def drop(self, position: int) -> None:
        """Nobody wants the features of `position`: a benchmark of targets alone takes none."""
        self.sender.drop(position)

    @ray.method(concurrency_group="ask")
    def release(self, slot: int) -> None:
        """The drafter has copied what lay in `slot`."""
        self.sender.release(slot)

    @ray.method(concurrency_group="ask")
    def offer(self, slots: int, slot_bytes: int) -> tuple[Remote, list[Buffer]]:
        """A probe for the drafter to read directly, and every buffer that messages may lie in. PeerError where that cannot work."""
        if self.spec.config.debug.no_peer_access:
            raise PeerError("debug.no_peer_access is set")
        return self.sender.offer(slots, slot_bytes), self.sender.buffers

    @ray.method(concurrency_group="ask")
    def store_probe(self) -> Payload:
        """The same amount through the object store."""
        return self.sender.store_probe()

    @ray.method(concurrency_group="ask")
    def direct(self, use: bool) -> None:
        """Whether messages go the direct way from now on."""
        if use:
            self.sender.open_direct()
        else:
            self.sender.close_direct()

    def _delay(self, position: int) -> None:
        longest = self.spec.config.debug.target_delay_seconds
        if longest:
            time.sleep(random.Random(f"{self.spec.config.run.seed} {self.name} {position}").uniform(0, longest))
        time.sleep(self.spec.config.debug.target_delays.get(self.name, 0.0))

    def _spoil(self, kind: str, batch: Batch, tensors: dict[str, torch.Tensor]) -> None:
        """The faults that the debug section asks for."""
        debug = self.spec.config.debug
        if kind == "train" and batch.number in debug.deadly_batches:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "train" and batch.number in debug.bad_batches:
            tensors["features"] = tensors["features"] * float("nan")
        if self.name == debug.deviant_target:
            tensors["features"] = tensors["features"] * 1.5
