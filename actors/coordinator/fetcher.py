"""The batcher of a run: started, asked for the plan and for token batches in groups, started again when it dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import ray

from actors.answers import ActorLost, CouldNotStart, RunFailed, answer, cause_of, first_line
from actors.coordinator.run_state import RunState
from actors.placement import start
from dflash_ray.pipeline.deadline import Deadline
from dflash_ray.pipeline.restarts import RestartBudget
from dflash_ray.run.build import PlanInfo
from dflash_ray.run.spec import RunSpec

START_LIMIT = 1800.0
FETCH_LIMIT = 300.0
GROUP = 8  # batches that one call brings, at most


class Fetcher:
    """`run` is set once there is a plan."""

    def __init__(self, spec: RunSpec, kind: Any, pump: Callable[[], None]):
        self.spec, self.kind, self.pump = spec, kind, pump
        self.run: RunState | None = None
        self.batcher: Any = None
        flow = spec.config.flow
        self.budget = RestartBudget(flow.restarts_per_hour)
        self.group = min(GROUP, max(1, flow.prefetch_batches // 4))
        self._fetching = Deadline(FETCH_LIMIT, flow.deadline_min_seconds, flow.deadline_factor)
        self._tasks: set[asyncio.Task] = set()

    async def plan(self) -> PlanInfo:
        """Starts the batcher, again and again if it dies while it plans."""
        while True:
            batcher = start(self.kind, "batcher", "batcher", self.spec, self.spec)
            try:
                plan = await answer(batcher.plan.remote(), "batcher", "the plan", START_LIMIT)
                self.batcher = batcher
                return plan
            except CouldNotStart as error:
                raise error.failure() from None
            except ActorLost as error:
                await self._kill(batcher, error)
            except ray.exceptions.RayTaskError as error:
                cause = cause_of(error)
                raise (cause if isinstance(cause, ValueError) else RunFailed(f"batcher: {first_line(cause)}")) from None

    def fetch(self, positions: list[int]) -> None:
        """Brings the tokens of `positions`, but for those quarantined before."""
        run, fetched = self.run, []
        for position in positions:
            item = run.item(position)
            if item.kind == "train" and item.number in run.quarantined:
                run.flow.quarantine(position)
            else:
                fetched.append(position)
        for first in range(0, len(fetched), self.group):
            task = asyncio.ensure_future(self._fetch(fetched[first : first + self.group]))
            self._tasks.add(task)
            task.add_done_callback(self._fetched)

    def _fetched(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.run.fail(task.exception())

    async def _fetch(self, positions: list[int]) -> None:
        run, items = self.run, [self.run.item(position) for position in positions]
        what = f"{items[0].kind} batch {items[0].number}" + (f" and {len(items) - 1} more" if len(items) > 1 else "")
        while True:
            await run.until(lambda: self.batcher is not None)
            batcher, began = self.batcher, run.now()
            wanted = [(item.kind, item.number) for item in items]
            infos_ref, *tokens_refs = batcher.fetch.options(num_returns=1 + len(wanted)).remote(wanted)
            try:
                infos = await answer(infos_ref, "batcher", what, self._fetching.limit(len(wanted)))
                break
            except ActorLost as error:
                if self.batcher is batcher:
                    self.batcher = None
                    await self._kill(batcher, error)
                    await self.plan()
                    self.pump()
            except ray.exceptions.RayTaskError as error:
                raise RunFailed(f"batcher, {what}: {first_line(cause_of(error))}") from None
        self._fetching.took(run.now() - began, len(wanted))
        for position, info, tokens_ref in zip(positions, infos, tokens_refs, strict=True):
            if run.flow.ready(position, self.spec.message_bytes(info.tokens, info.anchors), info.tokens):
                run.batches[position] = (info, tokens_ref)
        self.pump()

    async def _kill(self, dead: Any, error: ActorLost) -> None:
        delay = self.budget.next_delay(time.monotonic())
        if delay is None:
            raise RunFailed(f"{error}; the batcher's restarts of this hour are used up")
        if self.run is not None:
            self.run.death("batcher_restart", str(error), "batcher")
        ray.kill(dead)
        await asyncio.sleep(delay)

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
