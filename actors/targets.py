"""The targets of a run: spawned, fed, healed and re-sized at the line.

Whatever happens to a target, the batch it held goes back to the front and another one computes it. A target that dies comes back after
a growing pause, until its hour's budget is spent. A target that is asked to leave finishes its batch first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import ray

from actors.consumer import Consumer
from actors.placement import actor_options, name_taken
from actors.run_state import ActorLost, RunFailed, RunState, answer, cause_of, first_line
from dflash_ray.peer import Buffer
from dflash_ray.restarts import RestartBudget

START_LIMIT = 1800.0  # seconds to load the weights
SEND_LIMIT = 600.0
FIRST_BATCH_LIMIT = 1800.0  # kernels are compiled during the first batch


@dataclass
class Target:
    name: str
    handle: Any = None
    state: str = "starting"  # starting | working | leaving | waiting (to restart) | gone
    facts: dict[str, Any] = field(default_factory=dict)
    budget: RestartBudget = field(default_factory=lambda: RestartBudget(0))
    buffers: list[Buffer] = field(default_factory=list)  # of its GPU that the drafter has mapped
    batches: int = 0
    tokens: int = 0
    seconds: float = 0.0  # busy
    idle_since: float | None = None


class TargetPool:
    def __init__(self, run: RunState, pump: Callable[[], None], consumer: Consumer):
        self.run, self.pump, self.consumer = run, pump, consumer
        self.targets: dict[str, Target] = {}
        self.tasks: set[asyncio.Task] = set()
        self.wanted = run.spec.config.targets
        self.flow_since: float | None = None  # every actor but the targets is up since; None again once a batch has been handed out
        self._speeds: list[float] = []  # seconds per token of recent batches, all targets
        self._tokens, self._seconds = 0, 0.0

    # ---- size --------------------------------------------------------------------------------------------------------------

    def resize(self, count: int) -> None:
        """`count` targets from now on: new ones start, the last ones finish what they compute and leave."""
        self.wanted = count
        parked = self.run.flow.parked()
        alive = [t for t in self.targets.values() if t.state in ("starting", "working", "waiting")]
        alive.sort(key=lambda target: target.name in parked)  # those that do nothing leave first
        for target in alive[count:]:
            self._leave(target)
        for _ in range(count - len(alive)):
            self._start(Target(self._free_name(), budget=RestartBudget(self.run.spec.config.flow.restarts_per_hour)))
        if self.run.spec.config.flow.window is None:
            self.run.flow.resize(2 * count + 2)
        self.pump()

    def park(self) -> str | None:
        """The last target at work gets no more batches. Returns its name; None if it is the only one."""
        at_work = [t.name for t in self.targets.values() if t.state == "working" and t.name not in self.run.flow.parked()]
        if not at_work or not self.run.flow.park(at_work[-1]):
            return None
        self.targets[at_work[-1]].idle_since = None
        return at_work[-1]

    def wake(self) -> str | None:
        """The first parked target gets batches again. Returns its name, if there is one."""
        for name in self.run.flow.parked()[:1]:
            self.run.flow.wake(name)
            self.targets[name].idle_since = self.run.now()
            self.pump()
            return name
        return None

    def _free_name(self) -> str:
        taken = {t.name for t in self.targets.values() if t.state != "gone"}
        return next(name for name in (f"target-{i}" for i in range(len(taken) + 1)) if name not in taken)

    def _start(self, target: Target) -> None:
        self.targets[target.name] = target
        target.state = "starting"
        self._spawn(self._bring_up(target))

    async def _bring_up(self, target: Target) -> None:
        spec = self.run.spec
        try:
            target.handle = self.run.crew.target.options(**actor_options("target", target.name, spec)).remote(target.name, spec)
            target.facts = await answer(target.handle.describe.remote(), target.name, "start", START_LIMIT)
            target.buffers = await self.consumer.connect(target.name, target.handle)
        except ActorLost as error:
            self._died(target, str(error))
            return
        except ray.exceptions.RayTaskError as error:
            self.run.fail(RunFailed(f"{target.name} could not start: {first_line(cause_of(error))}"))
            return
        except ValueError as error:
            if not name_taken(error):
                raise
            self._died(target, first_line(error))
            return
        if target.state != "starting":  # asked to leave meanwhile
            self._bury(target)
            return
        target.state = "working"
        self.run.flow.add_target(target.name)
        target.idle_since = self.run.now()
        self.pump()

    def _leave(self, target: Target) -> None:
        working = target.state == "working"
        target.state = "leaving"
        if working and not self.run.flow.drain(target.name):
            return  # goes when its batch is computed
        if target.handle is not None or not working:
            self._bury(target)

    def _bury(self, target: Target) -> None:
        target.state = "gone"
        if target.handle is not None:
            ray.kill(target.handle)
        self._forget(target)
        self._remove(target)
        self.pump()

    def _remove(self, target: Target) -> None:
        if self.targets.get(target.name) is target:  # another one may have its name by now
            del self.targets[target.name]

    def _died(self, target: Target, reason: str) -> None:
        """Takes the batch back and restarts the actor after a pause, if the budget allows."""
        run = self.run
        leaving = target.state in ("leaving", "gone")
        if target.name in run.flow.targets and self.targets.get(target.name) is target:
            position = run.flow.lost(target.name)
            if position is not None:
                self._count_failure(position, f"{target.name}: {reason}")
        if target.handle is not None:
            ray.kill(target.handle)  # not dead yet if it only hung
            target.handle = None
        self._forget(target)
        if leaving or run.failure is not None:
            self._remove(target)
            self.pump()
            return
        delay = target.budget.next_delay(run.now())
        if delay is None:
            self._remove(target)
            run.event("target_given_up", f"{target.name}: {reason}; its restarts of this hour are used up", actor=target.name)
            if not self.targets:
                run.fail(RunFailed(f"no target is left: {target.name} was the last one ({reason})"))
        else:
            run.event("target_restart", f"{target.name}: {reason}; restarting in {delay:.1f} s", actor=target.name)
            target.state = "waiting"
            self._spawn(self._restart(target, delay))
        self.pump()

    def _forget(self, target: Target) -> None:
        self.consumer.forget(target.buffers)
        target.buffers = []

    async def _restart(self, target: Target, delay: float) -> None:
        await asyncio.sleep(max(delay, 0.2))  # Ray frees the name of a dead actor a moment after its death
        if target.state == "waiting":
            self._start(target)

    # ---- batches -----------------------------------------------------------------------------------------------------------

    def compute(self, name: str, position: int) -> None:
        target = self.targets[name]
        if self.flow_since is not None:
            seconds = self.run.now() - max(self.flow_since, target.idle_since)
            self.run.event("first_batch", f"handed to {name} {seconds:.2f} s after the actors were ready", seconds=seconds)
            self.flow_since = None
        if target.idle_since is not None:
            if self.run.step > 0:
                self.run.meter.target_waited(self.run.now() - target.idle_since, len(self.run.flow.targets))
            target.idle_since = None
        self._spawn(self._compute(target, position))

    async def _compute(self, target: Target, position: int) -> None:
        run, handle = self.run, target.handle
        facts, tokens_ref = run.batches[position]
        try:
            meta = await answer(
                handle.compute.remote(position, tokens_ref), target.name, f"batch {run.item(position).number}", self._limit(facts["tokens"])
            )
        except ActorLost as error:
            if target.handle is handle:
                self._died(target, str(error))
            return
        except ray.exceptions.RayTaskError as error:
            if target.handle is handle:
                run.flow.failed(target.name, position)
                run.event("target_error", f"{target.name}: {first_line(cause_of(error))}", actor=target.name)
                self._count_failure(position, f"{target.name}: {first_line(cause_of(error))}")
                if target.state == "leaving":
                    self._bury(target)
                self.pump()
            return
        if target.handle is not handle:  # taken out while its answer was on the way; another target has the batch now
            return
        self._speeds = [*self._speeds[-63:], meta["seconds"] / max(facts["tokens"], 1)]
        self._tokens += facts["tokens"]
        self._seconds += meta["seconds"]
        target.batches += 1
        target.tokens += facts["tokens"]
        target.seconds += meta["seconds"]
        target.idle_since = None if target.name in run.flow.parked() else run.now()
        sent_ref, payload_ref = handle.send.remote(position)
        meta |= {"arrival": run.arrivals, "handle": handle, "needed": True}
        run.features[position] = (meta, payload_ref)
        run.arrivals += 1
        gone = run.flow.computed(target.name, position, meta["seconds"])
        self.pump()
        del payload_ref
        try:
            meta["slot"] = await answer(sent_ref, target.name, "sending", SEND_LIMIT)
        except (ActorLost, ray.exceptions.RayTaskError):
            pass  # lost with it, or not made: staging finds out, and the batch is computed again
        if not meta["needed"]:
            run.let_go(meta)
        if gone:  # may leave only when nobody needs its memory any more
            await run.until(lambda: not any(meta["handle"] is handle for meta, _ in run.features.values()))
            self._bury(target)

    def _limit(self, tokens: int) -> float:
        """Seconds after which a batch is taken from its target: from measured speed once there is one."""
        flow = self.run.spec.config.flow
        if len(self._speeds) < 3:
            return FIRST_BATCH_LIMIT
        return max(flow.deadline_min_seconds, flow.deadline_factor * median(self._speeds) * tokens)

    def _count_failure(self, position: int, reason: str) -> None:
        run = self.run
        run.failures[position] = run.failures.get(position, 0) + 1
        if run.failures[position] < run.spec.config.flow.deaths_per_batch:
            return
        item = run.item(position)
        facts, _ = run.batches.pop(position)
        run.flow.set_aside(position)
        if item.kind == "train":
            run.aside[item.number] = {"batch": item.number, "sample_ids": facts["sample_ids"], "reason": reason}
        run.event(
            "set_aside",
            f"{item.kind} batch {item.number} failed {run.failures[position]} times, last on {reason}; it counts as empty",
            batch=item.number,
            line=item.kind,
            sample_ids=facts["sample_ids"],
        )

    # ---- tasks -------------------------------------------------------------------------------------------------------------

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.run.fail(task.exception())

    def close(self) -> None:
        for task in list(self.tasks):
            task.cancel()

    @property
    def tokens_per_second(self) -> float:
        """Of one busy target, the mean over all of them."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def table(self) -> list[dict[str, Any]]:
        queues, parked = self.run.flow.queues(), self.run.flow.parked()
        return [
            {
                "name": t.name,
                "state": "parked" if t.name in parked else t.state,
                "restarts": t.budget.total,
                "batches": t.batches,
                "tokens_per_second": t.tokens / t.seconds if t.seconds else 0.0,
                "q_pre": queues.get(t.name, 0),
            }
            for t in self.targets.values()
        ]
