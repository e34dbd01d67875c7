"""The consuming end of the line: stages features in order, trains on them, ends steps, validates, checkpoints, heals the drafter.

The drafter consumes positions next, next+1, ... and nothing else. One batch is staged while one trains. Checkpoints exist at step
boundaries only, after the validation that belongs there, and name the next batch; a drafter that dies is restored from the newest whole
one, the line goes back to its batch, and what stood in the files behind it is removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from actors.connect import connect
from actors.failures import count_failure
from actors.placement import start
from actors.run_state import LOST, ActorLost, CouldNotStart, RunFailed, RunState, answer, cause_of, first_line
from dflash_ray.checkpoint import newest_whole, prune, remove_leftovers
from dflash_ray.deadline import Deadline
from dflash_ray.flow import ASIDE, FEATURES, STAGED
from dflash_ray.line import Item
from dflash_ray.metrics import StepTally, balance_advice, console_line
from dflash_ray.peer import Buffer, PeerError
from dflash_ray.restarts import RestartBudget
from dflash_ray.run_folder import METRICS, TRAINED, VALIDATION

START_LIMIT = 1800.0
CALL_LIMIT = 1800.0  # one micro-step, step, snapshot or checkpoint write, until some are measured
RESTART_LEAST = 120.0
SHORT = 0.02  # seconds of a micro-step


class Consumer:
    def __init__(self, run: RunState, pump: Callable[[], None], total_steps: int, identity: dict[str, Any]):
        self.run, self.pump, self.total_steps, self.identity = run, pump, total_steps, identity
        self.drafter: Any = None
        self.up = False  # the drafter answers
        self.facts: dict[str, Any] = {}
        self.budget = RestartBudget(run.spec.config.flow.restarts_per_hour)
        self.tally = StepTally()
        self.staging = False  # something is on its way to the drafter
        self.one_by_one = 0  # positions below are staged by a call of their own
        self.staged: dict[int, dict[str, Any]] = {}  # position -> who made its features, and as which arrival
        self.trained: list[dict[str, Any]] = []  # lines for trained.jsonl of the step in progress
        self.validation: list[dict[str, float]] = []
        self.best_tau: float | None = None
        self.best_name: str | None = None
        self.skipped_in_a_row = 0
        self.last_loss: dict[str, Any] = {}
        self.last_checkpoint = run.now()
        self.checkpoint_step: int | None = None
        self.writing: asyncio.Task | None = None
        self.written_step = 0  # of the newest checkpoint on disk
        self.not_written = ""  # why a later one is not
        self._deadlines: dict[str, Deadline] = {}
        self.step_began = run.now()
        self.batches = 0
        self._tokens, self._seconds = 0, 0.0  # of micro-steps and optimizer steps
        self.initial: Path | None = None  # where the state comes from when there is no checkpoint yet; None: the seed

    # ---- the drafter's life --------------------------------------------------------------------------------------------------

    async def begin(self, resume: Path | None) -> int:
        """`bring_up`, again and again if the drafter dies while it starts."""
        while True:
            try:
                return await self.bring_up(resume)
            except CouldNotStart as error:
                raise error.failure() from None
            except ActorLost as error:
                await self._bury(error)

    async def bring_up(self, resume: Path | None) -> int:
        """Starts the drafter, restores `resume` if given, and returns the next batch."""
        spec = self.run.spec
        self.up = False
        self.drafter = start(self.run.crew.drafter, "drafter", "drafter", spec, spec, self.total_steps)
        try:
            self.facts = await self._timed(self.drafter.describe.remote(), "start")
            await self._call(self.drafter.rehearse.remote(self.run.most_tokens, self.run.most_anchors), "rehearsal", what=self.run.largest)
            self.up = True
            if resume is None:
                return 0
            meta = await self._timed(self.drafter.load.remote(resume), "load")
        except ray.exceptions.RayTaskError as error:
            cause = cause_of(error)
            raise (cause if isinstance(cause, ValueError) else RunFailed(f"the drafter could not start: {first_line(cause)}")) from None
        self._adopt(meta)
        return meta["next_batch"]

    async def _timed(self, call: ray.ObjectRef, kind: str, size: int = 1, what: str = "") -> Any:
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

    async def connect(self, name: str, target: Any) -> list[Buffer]:
        """Decides, once the drafter is up, which way the features of a target travel. Returns the buffers to `forget` with it."""
        await self.run.until(lambda: self.up)
        return await connect(self.run, name, target, self.drafter)

    def forget(self, buffers: list[Buffer]) -> None:
        if buffers and self.drafter is not None:
            self.drafter.forget.remote(buffers)

    def _adopt(self, meta: dict[str, Any]) -> None:
        self.run.step = meta["step"]
        # what was set aside after the checkpoint stays so, else a rewind would change what is trained
        self.run.aside = {entry["batch"]: entry for entry in meta["set_aside"]} | self.run.aside
        self.best_tau, self.best_name = meta["best_tau"], meta["best_name"]
        self.checkpoint_step = self.written_step = meta["step"]
        self.not_written = ""

    async def _restore(self, error: ActorLost) -> None:
        """A dead drafter: a new one, from the newest whole checkpoint, and the line goes back with it."""
        run = self.run
        while True:
            await self._bury(error)
            remove_leftovers(run.folder.checkpoints)
            checkpoint, refused = await asyncio.to_thread(newest_whole, run.folder.checkpoints)
            for line in refused:
                run.event("checkpoint_refused", line)
            path = checkpoint.path if checkpoint else self.initial
            try:
                next_batch = await self.bring_up(path)
                break
            except ActorLost as again:
                error = again
        if path is None:
            self._adopt({"step": 0, "set_aside": list(run.aside.values()), "best_tau": None, "best_name": None})
        self.tally, self.trained, self.validation, self.staged = StepTally(), [], [], {}
        run.flow.rewind(run.line.position(next_batch))
        run.folder.rewind(run.step, next_batch)
        run.meter.start(run.now())
        run.event("rewound", f"the drafter is back at step {run.step}, the line at batch {next_batch}", batch=next_batch)
        self.pump()

    async def _bury(self, error: ActorLost) -> None:
        """Makes sure that the drafter is dead, and waits until the next one may start. RunFailed when the hour's restarts are used up."""
        delay = self.budget.next_delay(self.run.now())
        if delay is None:
            raise RunFailed(f"{error}; the drafter's restarts of this hour are used up")
        self.run.death("drafter_restart", f"{error}; restarting in {delay:.1f} s", "drafter")
        if self.drafter is not None:
            ray.kill(self.drafter)
            self.drafter, self.up = None, False
        await self._finish_writing()
        await asyncio.sleep(max(delay, 0.5))  # a killed process may still be renaming what it wrote

    # ---- the loop ------------------------------------------------------------------------------------------------------------

    async def consume(self) -> None:
        """Walks the line to its end, or to the next step boundary after a stop was asked for."""
        while True:
            self.staging = False
            stager = asyncio.ensure_future(self._stage_all())
            stager.add_done_callback(lambda _: self.run.pulse.beat())
            try:
                await self._walk(stager)
                if await self._finish_writing() is None:
                    return
                raise ActorLost(self.not_written)  # it died while it wrote the last checkpoint
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
            self.staging, meta = True, run.features[position][0]
            tokens, number = run.batches[position][0]["tokens"], run.item(position).number
            position, told, *refs = self._message(position)
            call = self.drafter.stage.remote(position, told, *refs)
            del refs
            problem, lost = None, None
            try:
                problem = await self._timed(call, "stage", tokens, f"stage of batch {number}")
            except ray.exceptions.RayTaskError as error:
                unreachable = isinstance(cause_of(error), PeerError)
                if not unreachable and not isinstance(error, LOST):
                    raise RunFailed(f"drafter, stage: {first_line(cause_of(error))}") from None
                lost = first_line(cause_of(error))
                if unreachable:
                    meta["handle"].direct.remote(False)
            self._arrived(position, meta, problem, lost)
            self.pump()

    def _to_stage(self) -> int | None:
        """What the drafter should be given now."""
        position = None if self.staging else self.run.flow.to_stage()
        if position is None or position >= self.run.end or self._shares_a_call(position):
            return None
        return position

    def _message(self, position: int) -> tuple[Any, ...]:
        """What the drafter is told to stage `position`: position, facts, tokens, features."""
        (_, tokens_ref), (meta, payload_ref) = self.run.batches[position], self.run.features[position]
        return position, {"layer_ids": meta["layer_ids"]}, tokens_ref, payload_ref

    def _arrived(self, position: int, meta: dict[str, Any], problem: str | None, lost: str | None = None) -> None:
        """The features told of by `meta` are staged, or there is a `problem` with them, or they are `lost`."""
        run, flow, self.staging = self.run, self.run.flow, False
        run.let_go(meta)
        if run.features.get(position, (None,))[0] is not meta:
            return  # taken back while it was on the way
        if lost is not None:
            del run.features[position]
            run.event("features_lost", f"batch {run.item(position).number} from {meta['target']}: {lost}", actor=meta["target"])
            flow.unusable(position)
        elif problem is None:
            flow.staged(position)
            run.failures.pop(position, None)  # computed, arrived and looked at: whatever befell it had nothing to do with it
            self.staged[position] = {"target": meta["target"], "arrival": meta["arrival"]}
            del run.features[position]
        else:
            self._refuse(position, meta["target"], problem)

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
            if flow.state(position) == ASIDE:
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
            step_ends = item.kind == "validation" or run.line.ends_step(item.number)
            if item.kind == "train" and step_ends:
                await self._end_step(item.step)
            if not step_ends or (position + 1 < run.end and run.item(position + 1).kind == "validation"):
                continue  # a checkpoint lies after the validation that belongs to its step
            if item.kind == "validation":
                await self._end_validation(item.step)
            await self._maybe_checkpoint()
            if run.stop_reason is not None:
                return

    async def _until_here(self, position: int, stager: asyncio.Task) -> None:
        run, flow = self.run, self.run.flow

        def here() -> bool:
            state = flow.state(position)
            return state in (STAGED, ASIDE) or (state == FEATURES and not self.staging and self._shares_a_call(position))

        await run.until(lambda: stager.done() or here())
        if stager.done() and not here():
            stager.result()  # raises what ended it

    async def _call(self, call: ray.ObjectRef, kind: str, size: int = 1, what: str = "") -> Any:
        try:
            return await self._timed(call, kind, size, what)
        except ray.exceptions.RayTaskError as error:
            raise RunFailed(f"drafter, {what or kind}: {first_line(cause_of(error))}") from error

    async def _train(self, position: int, item: Item) -> int:
        """Trains `position`, and if it is not staged yet also those after it that may share the call. Returns the last one trained."""
        if self.run.flow.state(position) == FEATURES:
            return await self._train_line(position, item)
        tokens = self.run.batches[position][0]["tokens"]
        self._trained(position, await self._call(self.drafter.train.remote(position), "train", tokens, f"batch {item.number}"))
        return position

    def _shares_a_call(self, position: int) -> bool:
        """Whether `position`, whose features are there, is staged and trained in one call with its neighbours: only where micro-steps are
        so short that a call takes longer than what staging ahead would hide, and no target waits for its memory."""
        run, meta = self.run, self.run.features[position][0]
        seconds = run.flow.drafter_seconds
        short = seconds is not None and seconds < SHORT and position >= self.one_by_one
        return short and meta["sent"] and meta.get("slot") is None and run.item(position).kind == "train"

    async def _train_line(self, first: int, item: Item) -> int:
        """Stages and trains `first` and what has arrived behind it, up to the end of its step, in one call. Returns the last one trained,
        `first - 1` if none was."""
        run, flow, end = self.run, self.run.flow, first + 1
        limit = min(first + max(flow.window // 4, 1), run.end)  # credit moves with the answer
        while end < limit and flow.state(end) == FEATURES and self._shares_a_call(end) and run.item(end).step == item.step:
            end += 1
        line, self.staging = range(first, end), True
        metas, messages = [run.features[p][0] for p in line], [self._message(p) for p in line]
        tokens = sum(run.batches[p][0]["tokens"] for p in line)
        objects = [ref for _, _, *refs in messages for ref in refs]
        call = self.drafter.train_line.remote([(p, told) for p, told, *_ in messages], *objects)
        del messages, objects
        what = f"batch {item.number}" + (f" to {run.item(end - 1).number}" if end > first + 1 else "")
        try:
            seconds, problem = await self._timed(call, "train", tokens, what)
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error, LOST):
                raise RunFailed(f"drafter, {what}: {first_line(cause_of(error))}") from error
            self.staging, self.one_by_one = False, end  # nothing was begun; staged one by one they tell which are lost
            return first - 1
        for position, spent, meta in zip(line, seconds, metas, strict=False):
            self._arrived(position, meta, None)
            self._trained(position, spent)
        if problem is not None:
            self._arrived(first + len(seconds), metas[len(seconds)], problem)
        return first + len(seconds) - 1

    def _trained(self, position: int, seconds: float) -> None:
        item, (facts, _) = self.run.item(position), self.run.batches.pop(position)
        self.batches += 1
        self._tokens += facts["tokens"]
        self._seconds += seconds
        made = self.staged.pop(position)
        self.run.flow.done(position, seconds)
        self.tally.add(facts)
        self.trained.append({"batch": item.number, "step": item.step + 1, "sample_ids": facts["sample_ids"], **made})

    async def _validate(self, position: int) -> None:
        tokens = self.run.batches[position][0]["tokens"]
        self.validation.append(await self._call(self.drafter.evaluate.remote(position), "validation", tokens))
        self.run.batches.pop(position)
        self.staged.pop(position)
        self.run.flow.done(position)

    # ---- step, validation and checkpoint ---------------------------------------------------------------------------------------

    async def _end_step(self, step: int) -> None:
        """Optimizer step `step` (0-based) is due: in all files it is number step + 1."""
        run = self.run
        began = run.now()
        metrics = await self._call(self.drafter.step.remote(step), "step", what=f"step {step + 1}")
        run.step = step + 1
        now = run.now()
        self._seconds += now - began
        tally, self.tally = self.tally, StepTally()
        rates = run.meter.step(now, tally.real_tokens, tally.padded_tokens)
        tokens_left = max(run.meter.total_tokens - run.meter.done_tokens, 0)
        length, parked = tally.real_tokens / max(tally.documents, 1), len(run.flow.parked())
        spike = None if metrics.get("skipped") else run.meter.spike(metrics["loss"], length)
        record = {
            "step": run.step,
            **metrics,
            "loss_smooth": run.meter.smooth(metrics["loss"], tally.supervised),
            "real_tokens": tally.real_tokens,
            "padded_tokens": tally.padded_tokens,
            **rates,
            "mean_document_tokens": length,
            "buckets": sorted(tally.buckets),
            "q_pre": list(run.flow.queues().values()),
            "ahead": run.flow.ahead,
            "q_hs": run.flow.features_waiting(),
            "window_bytes": run.flow.window_used,
            "targets": len(run.flow.targets) - parked,
            "parked": parked,
            "spike": spike["factor"] if spike else None,
            "seconds": now - self.step_began,
            "eta_seconds": run.meter.eta_seconds(tokens_left, rates["real_tokens_per_second"]),
            "time": now,
        }
        self.step_began = now
        trained, self.trained = self.trained, []
        run.append(TRAINED, *trained)
        run.append(METRICS, record)
        run.tracker.log("train", record)
        run.ray_metrics.step(record)
        run.say(console_line(record, self.total_steps))
        self.last_loss = record
        self._look_at(record, tally, spike)

    def _look_at(self, record: dict[str, Any], tally: StepTally, spike: dict[str, float] | None) -> None:
        run = self.run
        if record.get("skipped"):
            self.skipped_in_a_row += 1
            run.event("step_skipped", f"step {run.step}: {record['skipped']}", sample_ids=tally.sample_ids)
            if self.skipped_in_a_row >= run.spec.config.train.max_skipped_steps:
                raise RunFailed(f"{self.skipped_in_a_row} steps in a row were skipped, last: {record['skipped']}")
            return
        self.skipped_in_a_row = 0
        if spike is not None:
            reason = (
                f"loss {record['loss']:.3f} is {spike['factor']:.1f} times the rolling median; documents of "
                f"{record['mean_document_tokens']:,.0f} tokens, usual are {spike['usual_tokens']:,.0f}"
            )
            run.event("spike", reason, sample_ids=tally.sample_ids, buckets=record["buckets"])
        advice = balance_advice(record["drafter_wait"], record["target_wait"], record["targets"], record["parked"])
        if advice is not None and run.step % 20 == 0:
            run.say(advice)

    async def _end_validation(self, step: int) -> None:
        run = self.run
        sums, self.validation = self.validation, []
        if not sums:
            return
        metrics = await self._call(self.drafter.combine.remote(sums), "validation metrics")
        run.append(VALIDATION, {"step": step, **metrics})
        run.tracker.log("validation", {"step": step, **metrics})
        run.say(f"validation at step {step}: tau {metrics['tau']:.3f} loss {metrics['loss']:.3f} acc {metrics['accuracy']:.3f}")
        if self.best_tau is None or metrics["tau"] > self.best_tau:
            self.best_tau, self.best_name = metrics["tau"], f"step-{step:08d}"
            await self._checkpoint("best validation tau so far")

    async def _maybe_checkpoint(self) -> None:
        run, config = self.run, self.run.spec.config.checkpoint
        if self.checkpoint_step == run.step:
            return
        if run.flow.next >= run.end:
            reason = "end of the run"
        elif run.stop_reason is not None:
            reason = run.stop_reason
        elif run.step % config.every_steps == 0:
            reason = f"every {config.every_steps} steps"
        elif run.now() - self.last_checkpoint >= config.every_minutes * 60:
            reason = f"every {config.every_minutes:g} minutes"
        else:
            return
        await self._checkpoint(reason)

    async def _checkpoint(self, reason: str) -> None:
        """Takes the snapshot now, between two steps, and lets it be written while training goes on."""
        run = self.run
        await self._finish_writing()
        await self._call(self.drafter.snapshot.remote(), "snapshot")
        next_batch = min(run.step * run.line.batches_per_step, run.line.batches)
        meta = {
            "step": run.step,
            "next_batch": next_batch,
            "set_aside": list(run.aside.values()),
            "best_tau": self.best_tau,
            "best_name": self.best_name,
            **self.identity,
        }
        self.checkpoint_step, self.last_checkpoint = run.step, run.now()
        self.writing = asyncio.ensure_future(self._write(meta, reason))

    async def _write(self, meta: dict[str, Any], reason: str) -> ActorLost | None:
        """Returns what the drafter's death says, if it died of it; the walk notices it too, unless it has ended."""
        run, began = self.run, self.run.now()
        try:
            await asyncio.to_thread(run.folder.sync)  # a checkpoint counts on the lines before it
            path = await self._timed(self.drafter.write.remote(run.folder.checkpoints, meta), "checkpoint")
        except ActorLost as error:
            self.not_written = str(error)
            return error
        except (ray.exceptions.RayTaskError, OSError) as error:
            cause = cause_of(error) if isinstance(error, ray.exceptions.RayTaskError) else error
            self.not_written = first_line(cause)
            run.event("checkpoint_failed", f"step {meta['step']}: {self.not_written}; training goes on, the last good one stays")
            return None
        self.written_step, self.not_written = meta["step"], ""
        run.event("checkpoint", f"step {meta['step']} ({reason})", path=path, seconds=run.now() - began)
        await asyncio.to_thread(prune, run.folder.checkpoints, run.spec.config.checkpoint.keep, self.best_name)
        if self.best_name == Path(path).name:
            try:
                run.folder.write_json("best.json", {"checkpoint": self.best_name, "tau": self.best_tau})
            except OSError as error:
                run.event("best_not_written", f"{self.best_name}: {error.strerror}")
        return None

    async def _finish_writing(self) -> ActorLost | None:
        writing, self.writing = self.writing, None
        return await writing if writing is not None else None

    @property
    def tokens_per_second(self) -> float:
        """Of the drafter while it trains: micro-steps and optimizer steps, no waiting."""
        return self._tokens / self._seconds if self._seconds else 0.0

    async def close(self) -> None:
        """At the end. RunFailed if the state of the last step is on no disk."""
        await self._finish_writing()
        if self.written_step != self.run.step:
            raise RunFailed(
                f"the checkpoint of step {self.run.step} could not be written: {self.not_written}; the last good one is of step "
                f"{self.written_step}"
            )
