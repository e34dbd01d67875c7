"""The drafter's process: started, restored from a checkpoint, asked with deadlines, killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray

from actors.answers import RunFailed, answer, cause_of, first_line
from actors.coordinator.connect import connect
from actors.coordinator.run_state import RunState
from actors.placement import start
from dflash_ray.pipeline.deadline import Deadline
from dflash_ray.pipeline.restarts import RestartBudget
from dflash_ray.run.checkpoint import CheckpointMeta
from dflash_ray.transport.peer import Buffer

START_LIMIT = 1800.0
CALL_LIMIT = 1800.0  # one micro-step, step, snapshot or checkpoint write, until some are measured
RESTART_LEAST = 120.0


class DrafterProcess:
    def __init__(self, run: RunState, total_steps: int):
        self.run, self.total_steps = run, total_steps
        self.handle: Any = None
        self.up = False  # it answers
        self.answered = False  # at least once
        self.budget = RestartBudget(run.spec.config.flow.restarts_per_hour)
        self._deadlines: dict[str, Deadline] = {}

    async def bring_up(self, resume: Path | None) -> CheckpointMeta | None:
        """Starts the drafter. Restores `resume` if given, and returns that checkpoint's meta."""
        spec = self.run.spec
        self.up = False
        self.handle = start(self.run.classes.drafter, "drafter", "drafter", spec, spec, self.total_steps)
        try:
            await self.timed(self.handle.vitals.remote(), "start")
            self.answered = True
            await self.call(self.handle.rehearse.remote(self.run.most_tokens, self.run.most_anchors), "rehearsal", what=self.run.largest)
            self.up = True
            return await self.timed(self.handle.load.remote(resume), "load") if resume is not None else None
        except ray.exceptions.RayTaskError as error:
            cause = cause_of(error)
            raise (cause if isinstance(cause, ValueError) else RunFailed(f"the drafter could not start: {first_line(cause)}")) from None

    async def timed(self, call: ray.ObjectRef, kind: str, size: int = 1, what: str = "") -> Any:
        """The drafter's answer; how long it may take follows from how long earlier calls of this `kind` took per `size`."""
        flow = self.run.spec.config.flow
        if kind in ("start", "load"):
            deadline = self._deadlines.setdefault(kind, Deadline(START_LIMIT, RESTART_LEAST, flow.deadline_factor))
        else:
            deadline = self._deadlines.setdefault(kind, Deadline(CALL_LIMIT, flow.deadline_min_seconds, flow.deadline_factor))
        began = self.run.now()
        value = await answer(call, "drafter", what or kind, deadline.limit(size))
        deadline.took(self.run.now() - began, size)
        return value

    async def call(self, call: ray.ObjectRef, kind: str, size: int = 1, what: str = "") -> Any:
        """`timed`, where an exception inside the drafter ends the run."""
        try:
            return await self.timed(call, kind, size, what)
        except ray.exceptions.RayTaskError as error:
            raise RunFailed(f"drafter, {what or kind}: {first_line(cause_of(error))}") from error

    async def connect(self, name: str, target: Any) -> list[Buffer]:
        """Decides, once the drafter is up, which way the features of a target travel. Returns the buffers to `forget` with it."""
        await self.run.until(lambda: self.up)
        return await connect(self.run, name, target, self.handle)

    def forget(self, buffers: list[Buffer]) -> None:
        if buffers and self.handle is not None:
            self.handle.forget.remote(buffers)

    def kill(self, reason: str) -> float:
        """Makes sure that the drafter is dead. Returns after how many seconds the next one may start; RunFailed when the hour's restarts
        are used up."""
        delay = self.budget.next_delay(self.run.now())
        if delay is None:
            raise RunFailed(f"{reason}; the drafter's restarts of this hour are used up")
        self.run.death("drafter_restart", f"{reason}; restarting in {delay:.1f} s", "drafter")
        if self.handle is not None:
            ray.kill(self.handle)
            self.handle, self.up = None, False
        return delay
