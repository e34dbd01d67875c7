"""The targets of a run: spawned, fed, healed and re-sized.

Whatever happens to a target, the batch it held goes back to the front and another one computes it. A target that dies, or takes so much
longer than its like that it must hang, comes back after a growing pause, until its hour's budget is spent. A target that is asked to
leave finishes its batch first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray

from actors.answers import LOST, ActorLost, CouldNotStart, RunFailed, answer, cause_of, first_line
from actors.coordinator.cross_check import CrossCheck
from actors.coordinator.drafter_process import DrafterProcess
from actors.coordinator.quarantine import count_failure
from actors.coordinator.run_state import HeldFeatures, RunState, Target
from actors.placement import start
from dflash_ray.pipeline.deadline import Deadline
from dflash_ray.pipeline.order import Item
from dflash_ray.pipeline.restarts import RestartBudget
from dflash_ray.transport.features import FeaturesInfo

START_LIMIT = 1800.0  # seconds to load the weights
SEND_LIMIT = 600.0
RESTART_LEAST = 120.0
FIRST_BATCH_LIMIT = 1800.0  # kernels are compiled during the first batch
FRESH_FACTOR = 5.0  # times what a batch may take is what the first one of a process may take


class TargetPool:
    def __init__(self, run: RunState, pump: Callable[[], None], drafter: DrafterProcess):
        self.run, self.pump, self.drafter = run, pump, drafter
        self.targets: dict[str, Target] = {}
        self.tasks: set[asyncio.Task] = set()
        self.wanted = run.spec.config.targets
        self.flow_since: float | None = None  # every actor but the targets is up since; None again once a batch has been handed out
        flow = run.spec.config.flow
        self._computing = Deadline(FIRST_BATCH_LIMIT, flow.deadline_min_seconds, flow.deadline_factor)
        self._sending = Deadline(SEND_LIMIT, flow.deadline_min_seconds, flow.deadline_factor)
        self._starting = Deadline(START_LIMIT, RESTART_LEAST, flow.deadline_factor)
        self.cross_check = CrossCheck(self)
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
            self.run.flow.window.size = 2 * count + 2
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
        self.spawn(self._bring_up(target))

    async def _bring_up(self, target: Target) -> None:
        run, spec, began = self.run, self.run.spec, self.run.now()
        target.handle = handle = start(run.classes.target, "target", target.name, spec, target.name, spec)
        try:
            await answer(handle.vitals.remote(), target.name, "start", self._starting.limit())
            await answer(handle.rehearse.remote(run.most_tokens, run.most_anchors), target.name, run.largest, self._starting.limit())
            self._starting.took(self.run.now() - began)
            target.buffers = await self.drafter.connect(target.name, handle)
        except (CouldNotStart, ray.exceptions.RayTaskError) as error:
            if isinstance(error, CouldNotStart):
                failure = error.failure()
            else:
                failure = RunFailed(f"{target.name} could not start, or not compute {run.largest}: {first_line(cause_of(error))}")
            if target.budget.total == 0 and not run.flow.targets:
                run.fail(failure)
            else:
                self._died(target, first_line(failure))
            return
        except ActorLost as error:
            self._died(target, str(error))
            return
        if target.state != "starting":  # asked to leave meanwhile
            self._kill(target)
            return
        target.state, target.fresh, target.checking = "working", True, 0
        self.run.flow.add_target(target.name)
        target.idle_since = self.run.now()
        self.pump()

    def _leave(self, target: Target) -> None:
        working = target.state == "working"
        target.state = "leaving"
        if working and not self.run.flow.drain(target.name):
            return  # goes when its batch is computed
        if target.handle is not None or not working:
            self._kill(target)

    def _kill(self, target: Target) -> None:
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
                count_failure(run, position, f"{target.name}: {reason}")
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
            run.death("target_given_up", f"{target.name}: {reason}; its restarts of this hour are used up", target.name)
            if not self.targets:
                run.fail(RunFailed(f"no target is left: {target.name} was the last one ({reason})"))
        else:
            run.death("target_restart", f"{target.name}: {reason}; restarting in {delay:.1f} s", target.name)
            target.state = "waiting"
            self.spawn(self._restart(target, delay))
        self.pump()

    def _forget(self, target: Target) -> None:
        self.drafter.forget(target.buffers)
        target.buffers = []

    async def _restart(self, target: Target, delay: float) -> None:
        await asyncio.sleep(delay)
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
        self.spawn(self._compute(target, position))

    async def _compute(self, target: Target, position: int) -> None:
        run, handle, item = self.run, target.handle, self.run.item(position)
        batch, tokens_ref = run.batches[position]
        limit = self._computing.limit(batch.tokens + target.checking)
        if target.fresh:
            limit = min(FRESH_FACTOR * limit, FIRST_BATCH_LIMIT)
        began, sampled = run.now(), self.cross_check.wants(item)
        info_ref, payload_ref = handle.compute.remote(position, item.kind, tokens_ref, sampled)
        try:
            info: FeaturesInfo = await answer(info_ref, target.name, f"batch {item.number}", limit)
        except ActorLost as error:
            if target.handle is handle:
                self._died(target, str(error))
            return
        except ray.exceptions.RayTaskError as error:
            if target.handle is handle:
                run.flow.failed(target.name, position)
                reason = f"{target.name}: {first_line(cause_of(error))}"
                if isinstance(error, LOST):  # the tokens went with a node; the batch did nothing wrong
                    run.event("tokens_lost", f"batch {item.number} for {reason}", actor=target.name)
                    run.flow.tokens_lost(position)
                else:
                    run.event("target_error", f"batch {item.number}: {reason}", actor=target.name)
                    count_failure(run, position, reason)
                if target.state == "leaving":
                    self._kill(target)
                self.pump()
            return
        if target.handle is not handle:  # taken out while its answer was on the way; another target has the batch now
            return
        self._computing.took(run.now() - began, batch.tokens)
        target.fresh = False
        self._tokens += batch.tokens
        self._seconds += info.seconds
        target.batches += 1
        target.tokens += batch.tokens
        target.seconds += info.seconds
        target.idle_since = None if target.name in run.flow.parked() else run.now()
        if not info.sent:
            sent_ref, payload_ref = handle.send.remote(position)
        if sampled:
            self.spawn(self.cross_check.run(target, item.number, tokens_ref, batch.tokens, info.sketch))
        del tokens_ref
        features = HeldFeatures(replace(info, sketch=None), payload_ref, handle, run.arrivals, info.sent)
        run.features[position] = features
        run.arrivals += 1
        gone = run.flow.computed(target.name, position, info.seconds)
        self.pump()
        del payload_ref
        if not info.sent:
            gone = await self._sent(sent_ref, target, features, item, batch.tokens) and gone
        if gone:  # may leave only when nobody needs its memory any more
            await run.until(lambda: not any(held.handle is handle for held in run.features.values()))
            self._kill(target)

    async def _sent(self, call: ray.ObjectRef, target: Target, features: HeldFeatures, item: Item, tokens: int) -> bool:
        """Waits until `features` have left the target. False if it died instead."""
        run, began = self.run, self.run.now()
        try:
            features.slot = await answer(call, target.name, f"sending batch {item.number}", self._sending.limit(tokens))
            features.sent = True
            self._sending.took(run.now() - began, tokens)
        except ActorLost as error:  # the payload is lost with it: staging finds out, and the batch is computed again
            if target.handle is features.handle:
                self._died(target, str(error))
            return False
        except ray.exceptions.RayTaskError:
            pass  # not made: staging finds out
        if not features.needed:
            run.let_go(features)
        return True

    def take_out(self, target: Target, reason: str) -> None:
        """A target that computes something else than the others does not come back."""
        run = self.run
        run.event("target_out_of_service", f"{target.name}: {reason}", actor=target.name)
        self.wanted -= 1
        target.state = "leaving"
        self._died(target, reason)

    def restart(self, target: Target, reason: str) -> None:
        self._died(target, reason)

    # ---- tasks -------------------------------------------------------------------------------------------------------------

    def spawn(self, coroutine: Any) -> None:
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
