"""What the coordinator's parts share: the flow, the refs that belong to its positions, and a pulse that wakes whoever waits for either.

The coordinator makes every call, so it owns every ref: a value returned by an actor call survives that actor's death.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray

from actors.ray_metrics import RayMetrics
from dflash_ray.data.batches.batch import BatchInfo
from dflash_ray.machine.processes import host_memory
from dflash_ray.pipeline.flow import Flow
from dflash_ray.pipeline.order import BatchOrder, Item
from dflash_ray.pipeline.restarts import RestartBudget
from dflash_ray.records import Record
from dflash_ray.run.folder import EVENTS, RunFolder
from dflash_ray.run.metric_records import Event, QuarantinedBatch, read_steps
from dflash_ray.run.spec import RunSpec
from dflash_ray.transport.features import FeaturesInfo
from dflash_ray.transport.peer import Buffer
from dflash_ray.watch.meter import Meter
from dflash_ray.watch.tracking import Tracker


class Pulse:
    """`beat` wakes everyone in `until`, who then looks at the state again: nobody polls, nobody misses a change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def beat(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._event.wait()


@dataclass(frozen=True)
class ActorClasses:
    """The classes that a run's actors are made of; a benchmark of the coordinator gives it others that answer at once."""

    batcher: Any
    target: Any
    drafter: Any


@dataclass
class Target:
    """One target over its restarts."""

    name: str
    handle: Any = None
    state: str = "starting"  # starting | working | leaving | waiting (to restart) | gone
    budget: RestartBudget = field(default_factory=lambda: RestartBudget(0))
    buffers: list[Buffer] = field(default_factory=list)  # of its GPU that the drafter has mapped
    batches: int = 0
    tokens: int = 0
    seconds: float = 0.0  # busy
    idle_since: float | None = None
    checking: int = 0  # tokens of cross-checks that stand before its next batch
    fresh: bool = True  # its process has computed nothing yet


@dataclass
class HeldFeatures:
    """Features that the coordinator holds a reference to, until the drafter has them."""

    info: FeaturesInfo
    payload: ray.ObjectRef | None  # None once nobody needs it: a reference keeps memory in the object store
    handle: Any  # of the target that made them
    arrival: int  # how many came before them, in whatever order
    sent: bool  # they have left the target
    needed: bool = True
    slot: int | None = None  # of the target's memory, where they lie in one


@dataclass
class RunState:
    spec: RunSpec
    folder: RunFolder
    order: BatchOrder
    flow: Flow
    meter: Meter
    tracker: Tracker
    end: int  # the position at which this run stops: the end of the batch order, or of run.max_steps
    classes: ActorClasses
    ray_metrics: RayMetrics
    pulse: Pulse = field(default_factory=Pulse)
    batches: dict[int, tuple[BatchInfo, ray.ObjectRef]] = field(default_factory=dict)  # by position; the ref is of the tokens
    features: dict[int, HeldFeatures] = field(default_factory=dict)  # by position
    quarantined: dict[int, QuarantinedBatch] = field(default_factory=dict)  # by batch number
    failures: dict[int, int] = field(default_factory=dict)  # position -> how often no target could compute it
    feature_slot_bytes: int = 0  # of the largest batch
    most_tokens: int = 0  # in a batch
    most_anchors: int = 0
    arrivals: int = 0  # features received so far, in whatever order
    step: int = 0  # optimizer steps done
    failure: BaseException | None = None
    stop_reason: str | None = None
    lines: list[str] = field(default_factory=list)  # console
    trouble: str | None = None  # why lines of the folder's files wait in memory

    def item(self, position: int) -> Item:
        return self.order.item(position)

    def rewind_files(self, next_batch: int) -> None:
        """The folder goes back to the step that the drafter is at, and what is computed from its lines with it."""
        self.folder.rewind(self.step, next_batch)
        self.meter.remember(read_steps(self.folder, "loss", "mean_document_tokens"))

    def let_go(self, features: HeldFeatures) -> None:
        """`features` are no longer needed: the target may have its memory back."""
        features.needed, features.payload = False, None
        if features.slot is not None:
            features.handle.release.remote(features.slot)
            features.slot = None

    def say(self, text: str) -> None:
        self.lines.append(text)
        self.pulse.beat()

    @property
    def largest(self) -> str:
        return f"a batch of {self.most_tokens:,} tokens and {self.most_anchors:,} anchors, the largest of this run"

    def event(self, kind: str, reason: str, /, **more: Any) -> None:
        record = Event(event=kind, step=self.step, time=time.time(), reason=reason, details=more)
        self.folder.append(EVENTS, record.as_json())
        self.say(f"{kind}: {reason}")
        self._tell_trouble()

    def append(self, name: str, *records: Record) -> None:
        self.folder.append(name, *(record.as_json() for record in records))
        self._tell_trouble()

    def _tell_trouble(self) -> None:
        """The run goes on where its files cannot be written, but not in silence."""
        trouble, before, self.trouble = self.folder.trouble, self.trouble, self.folder.trouble
        if trouble and not before:
            self.say(f"cannot write {self.folder.path}: {trouble}; lines wait in memory until there is room")

    def death(self, kind: str, reason: str, actor: str) -> None:
        """An actor's end, with what explains it most often: the host's memory and the queues."""
        free, total = host_memory()
        queues = {"q_pre": list(self.flow.queues().values()), "ahead": self.flow.ahead, "q_hs": self.flow.features_waiting()}
        where = f"host memory {free / 1e9:.1f} of {total / 1e9:.1f} GB free, window {self.flow.window.used / 1e6:,.0f} MB"
        self.event(kind, f"{reason} ({where})", actor=actor, host_free_bytes=free, **queues)

    def fail(self, error: BaseException) -> None:
        """Ends the run with `error`; the first one counts."""
        self.failure = self.failure or error
        self.pulse.beat()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for `condition`, or raises what ended the run."""
        await self.pulse.until(lambda: self.failure is not None or condition())
        if self.failure is not None:
            raise self.failure

    @staticmethod
    def now() -> float:
        return time.monotonic()
