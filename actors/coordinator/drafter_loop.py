"""The consuming end of the batch order: stages features in order, trains on them, ends steps, validates, checkpoints, heals the drafter.

The drafter consumes positions next, next+1, ... and nothing else. One batch is staged while one trains. Checkpoints exist at step
boundaries only, after the validation that belongs there, and name the next batch; a drafter that dies is restored from the newest whole
one, the order goes back to its batch, and what stood in the files behind it is removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from actors.answers import LOST, ActorLost, CouldNotStart, RunFailed, cause_of, first_line
from actors.coordinator.checkpoints import Checkpoints
from actors.coordinator.drafter_process import DrafterProcess
from actors.coordinator.quarantine import count_failure
from actors.coordinator.run_state import HeldFeatures, RunState
from actors.coordinator.steps import Steps
from dflash_ray.pipeline.order import Item
from dflash_ray.pipeline.states import FEATURES, QUARANTINED, STAGED
from dflash_ray.run.checkpoint import CheckpointMeta, RunIdentity, newest_whole, remove_leftovers
from dflash_ray.run.metric_records import QuarantinedBatch
from dflash_ray.transport.peer import PeerError

SHORT = 0.02  # seconds of a micro-step


class DrafterLoop:
    """`initial` is where the state comes from while there is no checkpoint yet; None: the seed."""

    def __init__(self, run: RunState, pump: Callable[[], None], total_steps: int, identity: RunIdentity, initial: Path | None):
        self.run, self.pump, self.initial = run, pump, initial
        self.drafter = DrafterProcess(run, total_steps)
        self.checkpoints = Checkpoints(run, self.drafter, identity)
        self.steps = Steps(run, total_steps)
        self.staging = False  # something is on its way to the drafter
        self.one_by_one = 0  # positions below are staged by a call of their own
        self.staged: dict[int, HeldFeatures] = {}  # by position
        self.validation: list[dict[str, float]] = []

    # ---- the drafter's life --------------------------------------------------------------------------------------------------

    async def begin(self) -> int:
        """Starts the drafter, again and again if it dies while it starts. Returns the next batch."""
        while True:
            try:
                return self._adopt(await self.drafter.bring_up(self.initial))
            except CouldNotStart as error:
                raise error.failure() from None
            except ActorLost as error:
                await self._kill(error)

    def _adopt(self, meta: CheckpointMeta | None) -> int:
        """The run is at the checkpoint that `meta` tells of. Returns its next batch."""
        if meta is None:
            return 0
        self.run.step = meta.step
        # what was quarantined after the checkpoint stays so, else a rewind would change what is trained
        before = [QuarantinedBatch.from_json(entry, "an entry of set_aside", "batch") for entry in meta.set_aside]
        self.run.quarantined = {entry.batch: entry for entry in before} | self.run.quarantined
        self.checkpoints.adopt(meta)
        return meta.next_batch

    async def _restore(self, error: ActorLost) -> None:
        """A dead drafter: a new one, from the newest whole checkpoint, and the order goes back with it."""
        run = self.run
        while True:
            await self._kill(error)
            remove_leftovers(run.folder.checkpoints)
            checkpoint, refused = await asyncio.to_thread(newest_whole, run.folder.checkpoints)
            for line in refused:
                run.event("checkpoint_refused", line)
            try:
                meta = await self.drafter.bring_up(checkpoint.path if checkpoint else self.initial)
                break
            except ActorLost as again:
                error = again
        next_batch = self._adopt(meta or self.checkpoints.meta(0, 0))
        self.steps.forget()
        self.validation, self.staged = [], {}
        run.flow.rewind(run.order.position(next_batch))
        run.rewind_files(next_batch)
        run.meter.start(run.now())
        run.event("rewound", f"the drafter is back at step {run.step}, the line at batch {next_batch}", batch=next_batch)
        self.pump()

    async def _kill(self, error: ActorLost) -> None:
        delay = self.drafter.kill(first_line(error.failure() if isinstance(error, CouldNotStart) else error))
        await self.checkpoints.finish()
        await asyncio.sleep(max(delay, 0.5))  # a killed process may still be renaming what it wrote

    # ---- the loop ------------------------------------------------------------------------------------------------------------

    async def consume(self) -> None:
        """Walks the batch order to its end, or to the next step boundary after a stop was asked for."""
        while True:
            self.staging = False
            stager = asyncio.ensure_future(self._stage_all())
            stager.add_done_callback(lambda _: self.run.pulse.beat())
            try:
                await self._walk(stager)
                if await self.checkpoints.finish() is None:
                    return
                raise ActorLost(self.checkpoints.not_written)  # it died while it wrote the last checkpoint
            except ActorLost as error:
                await self._stop(stager)
                await self._restore(error)
            finally:
                await self._stop(stager)

    @staticmethod
    async def _stop(task: asyncio.Task) -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _stage_all(self) -> None:
        run = self.run
        while True:
            await run.until(lambda: self._to_stage() is not None)
            position = self._to_stage()
            self.staging, features = True, run.features[position]
            tokens, number = run.batches[position][0].tokens, run.item(position).number
            call = self.drafter.handle.stage.remote(*self._message(position))
            problem, lost = None, None
            try:
                problem = await self.drafter.timed(call, "stage", tokens, f"stage of batch {number}")
            except ray.exceptions.RayTaskError as error:
                unreachable = isinstance(cause_of(error), PeerError)
                if not unreachable and not isinstance(error, LOST):
                    raise RunFailed(f"drafter, stage: {first_line(cause_of(error))}") from None
                lost = first_line(cause_of(error))
                if unreachable:
                    features.handle.direct.remote(False)
            self._arrived(position, features, problem, lost)
            self.pump()

    def _to_stage(self) -> int | None:
        """What the drafter should be given now."""
        position = None if self.staging else self.run.flow.to_stage()
        if position is None or position >= self.run.end or self._shares_a_call(position):
            return None
        return position

    def _message(self, position: int) -> tuple[Any, ...]:
        """What the drafter is told to stage `position`: position, layer ids, tokens, features."""
        (_, tokens_ref), features = self.run.batches[position], self.run.features[position]
        return position, features.info.layer_ids, tokens_ref, features.payload

    def _arrived(self, position: int, features: HeldFeatures, problem: str | None, lost: str | None = None) -> None:
        """`features` are staged, or there is a `problem` with them, or they are `lost`."""
        run, flow, self.staging = self.run, self.run.flow, False
        target = features.info.target
        run.let_go(features)
        if run.features.get(position) is not features:
            return  # taken back while it was on the way
        if lost is not None:
            del run.features[position]
            run.event("features_lost", f"batch {run.item(position).number} from {target}: {lost}", actor=target)
            flow.unusable(position)
        elif problem is None:
            flow.staged(position)
            run.failures.pop(position, None)  # computed, arrived and looked at: whatever befell it had nothing to do with it
            self.staged[position] = features
            del run.features[position]
        else:
            self._refuse(position, target, problem)

    def _refuse(self, position: int, target: str, problem: str) -> None:
        """Features that are not what was asked for: computed again, but not for ever."""
        self.run.event("bad_features", f"batch {self.run.item(position).number} from {target}: {problem}", actor=target)
        self.run.flow.unusable(position)
        count_failure(self.run, position, f"{target}: {problem}")

    async def _walk(self, stager: asyncio.Task) -> None:
        run, flow = self.run, self.run.flow
        while flow.next < run.end:
            position = flow.next
            item = run.item(position)
            began = run.now()
            await self._until_here(position, stager)
            if run.step > 0:
                run.meter.drafter_waited(run.now() - began)
            if flow.state(position) == QUARANTINED:
                flow.done(position)
            elif item.kind == "train":
                last = await self._train(position, item)
                if last < position:
                    self.pump()
                    continue
                position, item = last, run.item(last)
            else:
                await self._validate(position)
            self.pump()
            step_ends = item.kind == "validation" or run.order.ends_step(item.number)
            if item.kind == "train" and step_ends:
                await self._end_step(item.step)
            if not step_ends or (position + 1 < run.end and run.item(position + 1).kind == "validation"):
                continue  # a checkpoint lies after the validation that belongs to its step
            if item.kind == "validation":
                await self._end_validation(item.step)
            await self.checkpoints.take_if_due()
            if run.stop_reason is not None:
                return

    async def _until_here(self, position: int, stager: asyncio.Task) -> None:
        run, flow = self.run, self.run.flow

        def here() -> bool:
            state = flow.state(position)
            return state in (STAGED, QUARANTINED) or (state == FEATURES and not self.staging and self._shares_a_call(position))

        await run.until(lambda: stager.done() or here())
        if stager.done() and not here():
            stager.result()  # raises what ended it

    async def _train(self, position: int, item: Item) -> int:
        """Trains `position`, and if it is not staged yet also those after it that may share the call. Returns the last one trained."""
        if self.run.flow.state(position) == FEATURES:
            return await self._train_group(position, item)
        tokens = self.run.batches[position][0].tokens
        call = self.drafter.handle.train.remote(position)
        self._trained(position, await self.drafter.call(call, "train", tokens, f"batch {item.number}"))
        return position

    def _shares_a_call(self, position: int) -> bool:
        """Whether `position`, whose features are there, is staged and trained in one call with its neighbours: only where micro-steps are
        so short that a call takes longer than what staging ahead would hide, and no target waits for its memory."""
        run, features = self.run, self.run.features[position]
        seconds = run.flow.drafter_seconds
        short = seconds is not None and seconds < SHORT and position >= self.one_by_one
        return short and features.sent and features.slot is None and run.item(position).kind == "train"

    async def _train_group(self, first: int, item: Item) -> int:
        """Stages and trains `first` and what has arrived behind it, up to the end of its step, in one call. Returns the last one trained,
        `first - 1` if none was."""
        run, flow, end = self.run, self.run.flow, first + 1
        limit = min(first + max(flow.window.size // 4, 1), run.end)  # credit moves with the answer
        while end < limit and flow.state(end) == FEATURES and self._shares_a_call(end) and run.item(end).step == item.step:
            end += 1
        group, self.staging = range(first, end), True
        held, messages = [run.features[p] for p in group], [self._message(p) for p in group]
        tokens = sum(run.batches[p][0].tokens for p in group)
        objects = [ref for _, _, *refs in messages for ref in refs]
        call = self.drafter.handle.train_group.remote([(p, layer_ids) for p, layer_ids, *_ in messages], *objects)
        del messages, objects
        what = f"batch {item.number}" + (f" to {run.item(end - 1).number}" if end > first + 1 else "")
        try:
            seconds, problem = await self.drafter.timed(call, "train", tokens, what)
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error, LOST):
                raise RunFailed(f"drafter, {what}: {first_line(cause_of(error))}") from error
            self.staging, self.one_by_one = False, end  # nothing was begun; staged one by one they tell which are lost
            return first - 1
        for position, spent, features in zip(group, seconds, held, strict=False):
            self._arrived(position, features, None)
            self._trained(position, spent)
        if problem is not None:
            self._arrived(first + len(seconds), held[len(seconds)], problem)
        return first + len(seconds) - 1

    def _trained(self, position: int, seconds: float) -> None:
        info, _ = self.run.batches.pop(position)
        self.run.flow.done(position, seconds)
        self.steps.add(self.run.item(position), info, self.staged.pop(position), seconds)

    async def _validate(self, position: int) -> None:
        tokens = self.run.batches[position][0].tokens
        call = self.drafter.handle.evaluate.remote(position)
        self.validation.append(await self.drafter.call(call, "validation", tokens))
        self.run.batches.pop(position)
        self.staged.pop(position)
        self.run.flow.done(position)

    async def _end_step(self, step: int) -> None:
        began = self.run.now()
        metrics = await self.drafter.call(self.drafter.handle.step.remote(step), "step", what=f"step {step + 1}")
        self.steps.end(step, metrics, self.run.now() - began)

    async def _end_validation(self, step: int) -> None:
        sums, self.validation = self.validation, []
        if not sums:
            return
        metrics = await self.drafter.call(self.drafter.handle.combine.remote(sums), "validation metrics")
        self.steps.validated(step, metrics)
        await self.checkpoints.validated(step, metrics)
