"""CoordinatorActor: owns the channels and the refs, spawns and heals the others, measures and reports. Its loops never block."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import ray

from actors.batcher import BatcherActor
from actors.consumer import Consumer
from actors.drafter import DrafterActor
from actors.failures import earlier_set_aside
from actors.placement import environment, gpus_wanted, hide_gpus, start
from actors.power import PowerWatch
from actors.ray_metrics import RayMetrics
from actors.run_state import ActorLost, CouldNotStart, Crew, RunFailed, RunState, answer, cause_of, first_line
from actors.target import TargetActor
from actors.targets import TargetPool
from actors.vitals import Vitals
from dflash_ray.checkpoint import Checkpoint, read_checkpoint, remove_leftovers
from dflash_ray.deadline import Deadline
from dflash_ray.draft.trainer import check_same_training
from dflash_ray.flow import Flow
from dflash_ray.line import Line
from dflash_ray.metrics import Meter
from dflash_ray.restarts import RestartBudget
from dflash_ray.run_folder import RunFolder
from dflash_ray.setup import RunSpec
from dflash_ray.tracking import Tracker

STORE_SHARE = 0.7  # of the object store may be features in flight
START_LIMIT = 1800.0
FETCH_LIMIT = 300.0
FETCH_GROUP = 8  # batches that one call to the batcher brings, at most
LOCK_PATIENCE = 60.0  # seconds for the actors of a killed driver to end
CREW = Crew(BatcherActor, TargetActor, DrafterActor)


@ray.remote
class CoordinatorActor:
    def __init__(self, spec: RunSpec, resume: Path | None, store_bytes: int, facts: dict[str, Any], crew: Crew | None = None):
        hide_gpus()
        self.spec, self.resume, self.store_bytes, self.facts, self.crew = spec, resume, store_bytes, facts, crew or CREW
        self.run_state: RunState | None = None
        self.pool: TargetPool | None = None
        self.consumer: Consumer | None = None
        self.batcher: Any = None
        self.vitals: Vitals | None = None
        self.batcher_budget = RestartBudget(spec.config.flow.restarts_per_hour)
        flow = spec.config.flow
        self.fetching = Deadline(FETCH_LIMIT, flow.deadline_min_seconds, flow.deadline_factor)
        self.early_stop: str | None = None
        self.ready = False  # every actor but the targets is up, the flow may move
        self.ended = asyncio.Event()
        self.tasks: set[asyncio.Task] = set()

    def __repr__(self) -> str:
        return "coordinator"

    # ---- the run -------------------------------------------------------------------------------------------------------------

    def _later(self, text: str) -> None:
        """Says `text` from another thread."""
        self.loop.call_soon_threadsafe(lambda: self.run_state.say(text))

    async def run(self) -> dict[str, Any]:
        """The whole run. Returns its summary; raises ValueError for what the user must change, RunFailed for what broke."""
        try:
            self.loop = asyncio.get_running_loop()
            run = await self._start()
            began = time.time()
            await self.consumer.consume()
            await self.consumer.close()
            await asyncio.to_thread(run.tracker.close)
            return self._summary(time.time() - began, run)
        except ActorLost as error:
            raise RunFailed(str(error)) from None
        except OSError as error:
            raise RunFailed(f"run folder {self.spec.run_dir}: {error.strerror or error}") from None
        finally:
            if self.pool is not None:
                self.pool.close()
                self.vitals.close()
            for task in list(self.tasks):
                task.cancel()
            self.ended.set()
            if self.run_state is not None:
                self.run_state.pulse.beat()

    async def _start(self) -> RunState:
        spec = self.spec
        plan = await self._plan()
        config = spec.config
        line = Line(plan["batches"], config.train.batches_per_step, config.validation.every_steps, plan["validation_batches"])
        end = line.total
        if config.run.max_steps is not None and config.run.max_steps < line.steps:
            end = line.position(config.run.max_steps * line.batches_per_step)
        flow = Flow(
            end,
            window=spec.window,
            window_bytes=self._window_bytes(plan),
            prefetch=config.flow.prefetch_batches,
            queue_per_target=config.flow.queue_per_target,
            slow_factor=config.flow.slow_factor,
            fetch_group=min(FETCH_GROUP, max(1, config.flow.prefetch_batches // 4)),
        )
        identity = {"plan": plan["plan"], "dataset": plan["dataset"], "batches_per_step": line.batches_per_step, "seed": config.run.seed}
        if self.resume is not None:
            self._check_identity(read_checkpoint(self.resume), identity, line.steps)
        folder, told = RunFolder(spec.run_dir), self._later
        await self._lock(folder)
        folder.create(config, self.facts)
        remove_leftovers(folder.checkpoints)
        meter, tracker, metrics = Meter(plan["tokens"]), Tracker(config, folder.path, told), RayMetrics(config.run.name)
        run = self.run_state = RunState(spec, folder, line, flow, meter, tracker, end, self.crew, metrics)
        run.feature_slot_bytes = plan["most_tokens"] * spec.shape.features * spec.feature_bytes
        run.most_tokens, run.most_anchors = plan["most_tokens"], plan["most_anchors"]
        run.stop_reason = self.early_stop
        self.consumer = Consumer(run, self.pump, line.steps, identity)
        self.consumer.initial = self.resume
        self.pool = TargetPool(run, self.pump, self.consumer)
        self.vitals = Vitals(run, PowerWatch(run, self.pool), metrics, self._questions)
        self._keep_asking()
        run.say(
            f"{plan['samples']:,} samples, {plan['batches']:,} batches ({spec.strategy}: {spec.strategy_reason}), {line.steps:,} steps; "
            f"starting {config.targets} targets and 1 drafter on {spec.device}"
        )
        run.say("environment of every actor: " + " ".join(f"{name}={value}" for name, value in sorted(environment(spec).items())))
        if self.resume is not None:
            run.aside = earlier_set_aside(run)
        starting = asyncio.ensure_future(self.consumer.begin(self.resume))
        self.pool.resize(config.targets)
        next_batch = await starting
        if next_batch:
            flow.skip_to(line.position(next_batch))
        run.folder.rewind(run.step, next_batch)
        run.meter.skip(plan["tokens"] * next_batch // max(plan["batches"], 1))
        if self.resume is not None:
            run.event("resumed", f"from {self.resume}: step {run.step}, next batch {next_batch}", batch=next_batch)
        run.meter.start(run.now())
        self.consumer.step_began = run.now()
        self.ready, self.pool.flow_since = True, run.now()
        self.pump()
        return run

    async def _lock(self, folder: RunFolder) -> None:
        """Two runs must never write one folder, also where the first one is only about to end."""
        deadline = time.monotonic() + LOCK_PATIENCE
        while not folder.lock():
            if time.monotonic() > deadline:
                raise ValueError(f"run.dir: another run writes to {folder.path}; stop it first, or choose another folder")
            await asyncio.sleep(0.5)

    def _check_identity(self, checkpoint: Checkpoint, mine: dict[str, Any], total_steps: int) -> None:
        """A checkpoint continues only the run it was made by: the same data, plan, seed and drafter."""
        if "trainer" not in checkpoint.meta:
            raise ValueError(f"checkpoint {checkpoint.path}: meta.json has no trainer; it was not written by this trainer")
        check_same_training(checkpoint.meta["trainer"], self.spec.shape, self.spec.config.optimizer.name, total_steps)
        keys = {"plan": "data, batching, anchors, train.epochs", "dataset": "data.path", "batches_per_step": "train.batches_per_step"}
        for name, value in checkpoint.meta.items():
            if name in mine and mine[name] != value:
                raise ValueError(
                    f"--resume: the checkpoint's {name} is {value}, this run's is {mine[name]}; "
                    f"continue with the same {keys.get(name, 'run.' + name)}, or start over with --fresh"
                )

    def _window_bytes(self, plan: dict[str, Any]) -> int:
        """What may be in flight; ValueError, with the arithmetic, where not even one batch fits the object store."""
        tokens, anchors = plan["most_tokens"], plan["most_anchors"]
        largest = self.spec.message_bytes(tokens, anchors)
        room = int(STORE_SHARE * self.store_bytes)
        wanted = self.spec.config.flow.window_bytes or room
        if largest > room:
            raise ValueError(
                f"batching.token_budget: the largest batch has {tokens:,} tokens x {self.spec.shape.features:,} features "
                f"x {self.spec.feature_bytes} B = {largest / 1e6:,.0f} MB, more than {STORE_SHARE:g} of the object store "
                f"({self.store_bytes / 1e6:,.0f} MB); lower the budget or enlarge the store (/dev/shm)"
            )
        if wanted > room:
            raise ValueError(
                f"flow.window_bytes: {wanted / 1e6:,.0f} MB is more than {STORE_SHARE:g} of the object store "
                f"({self.store_bytes / 1e6:,.0f} MB = {room / 1e6:,.0f} MB usable); lower it or enlarge the store (/dev/shm)"
            )
        window = self.spec.config.flow.window
        if window is not None and window * largest > wanted:
            raise ValueError(
                f"flow.window: {window:,} batches x {largest / 1e6:,.1f} MB ({tokens:,} tokens x {self.spec.shape.features:,} features "
                f"x {self.spec.feature_bytes} B) = {window * largest / 1e6:,.0f} MB, and {wanted / 1e6:,.0f} MB may be in flight; "
                "lower it, or enlarge the store (/dev/shm) or flow.window_bytes"
            )
        return wanted

    # ---- batcher -------------------------------------------------------------------------------------------------------------

    async def _plan(self) -> dict[str, Any]:
        """Starts the batcher, again and again if it dies while it plans."""
        while True:
            batcher = start(self.crew.batcher, "batcher", "batcher", self.spec, self.spec)
            try:
                plan = await answer(batcher.describe.remote(), "batcher", "the plan", START_LIMIT)
                self.batcher = batcher
                return plan
            except CouldNotStart as error:
                raise error.failure() from None
            except ActorLost as error:
                await self._bury_batcher(batcher, error)
            except ray.exceptions.RayTaskError as error:
                cause = cause_of(error)
                raise (cause if isinstance(cause, ValueError) else RunFailed(f"batcher: {first_line(cause)}")) from None

    async def _fetch(self, positions: list[int]) -> None:
        run, items = self.run_state, [self.run_state.item(position) for position in positions]
        what = f"{items[0].kind} batch {items[0].number}" + (f" and {len(items) - 1} more" if len(items) > 1 else "")
        while True:
            await run.until(lambda: self.batcher is not None)
            batcher, began = self.batcher, run.now()
            wanted = [(item.kind, item.number) for item in items]
            facts_ref, *tokens_refs = batcher.fetch.options(num_returns=1 + len(wanted)).remote(wanted)
            try:
                facts = await answer(facts_ref, "batcher", what, self.fetching.limit(len(wanted)))
                break
            except ActorLost as error:
                if self.batcher is batcher:
                    self.batcher = None
                    await self._bury_batcher(batcher, error)
                    await self._plan()
                    self.pump()
            except ray.exceptions.RayTaskError as error:
                raise RunFailed(f"batcher, {what}: {first_line(cause_of(error))}") from None
        self.fetching.took(run.now() - began, len(wanted))
        for position, meta, tokens_ref in zip(positions, facts, tokens_refs, strict=True):
            if run.flow.ready(position, self.spec.message_bytes(meta["tokens"], meta["anchors"]), meta["tokens"]):
                run.batches[position] = (meta, tokens_ref)
        self.pump()

    async def _bury_batcher(self, dead: Any, error: ActorLost) -> None:
        delay = self.batcher_budget.next_delay(time.monotonic())
        if delay is None:
            raise RunFailed(f"{error}; the batcher's restarts of this hour are used up")
        if self.run_state is not None:
            self.run_state.death("batcher_restart", str(error), "batcher")
        ray.kill(dead)
        await asyncio.sleep(delay)

    # ---- the pump ------------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """After every change: let go of what nobody needs, fetch what is wanted, start what may start, wake who waits."""
        run = self.run_state
        if not self.ready or run.failure is not None:
            return
        for position in run.flow.take_dropped():
            run.batches.pop(position, None)
            if (dropped := run.features.pop(position, None)) is not None:
                run.let_go(dropped[0])
        if self.batcher is not None:
            self._fetch_or_leave_aside(run.flow.wanted())
        for name, position in run.flow.assign():
            self.pool.compute(name, position)
        run.pulse.beat()

    def _fetch_or_leave_aside(self, positions: list[int]) -> None:
        run, fetched = self.run_state, []
        for position in positions:
            item = run.item(position)
            if item.kind == "train" and item.number in run.aside:
                run.flow.set_aside(position)
            else:
                fetched.append(position)
        for first in range(0, len(fetched), FETCH_GROUP):
            task = asyncio.ensure_future(self._fetch(fetched[first : first + FETCH_GROUP]))
            self.tasks.add(task)
            task.add_done_callback(self._fetched)

    def _fetched(self, task: asyncio.Task) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.run_state.fail(task.exception())

    # ---- what others ask -----------------------------------------------------------------------------------------------------

    async def stop(self, reason: str) -> None:
        """Ends the run at the next step boundary, with a checkpoint."""
        self.early_stop = reason
        if self.run_state is not None:
            self.run_state.stop_reason = reason
            self.run_state.pulse.beat()

    async def scale(self, targets: int) -> dict[str, int]:
        """`targets` targets from now on; those that leave finish their batch. Returns how many there were, and the step."""
        if targets < 1:
            raise ValueError(f"targets: {targets}; a run needs at least 1")
        run = self.run_state
        if run is None or self.pool is None or self.ended.is_set():
            raise ValueError("the run has not started yet or has ended; a running one can be scaled")
        placement = self.spec.config.placement
        if self.spec.device == "cuda" and targets > self.pool.wanted:
            gpus = (await asyncio.to_thread(ray.cluster_resources)).get("GPU", 0.0)
            wanted = gpus_wanted(targets, placement.gpus_per_target, placement.gpus_per_drafter)
            if wanted > gpus:
                raise ValueError(f"targets: {targets} and the drafter want {wanted:g} GPUs, the cluster has {gpus:g}")
        before = self.pool.wanted
        self.pool.resize(targets)
        run.event("scaled", f"{before} -> {targets} targets at step {run.step}", targets=targets)
        return {"before": before, "targets": targets, "step": run.step}

    async def reports(self, after: int, wait: float) -> dict[str, Any]:
        """Console lines from number `after` on; returns when there is one, the run has ended, or `wait` seconds have passed."""
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline:
            lines = self.run_state.lines if self.run_state is not None else []
            if len(lines) > after or self.ended.is_set():
                break
            await asyncio.sleep(0.05)
        lines = self.run_state.lines[after:] if self.run_state is not None else []
        return {"lines": lines, "ended": self.ended.is_set(), **self._progress()}

    def _progress(self) -> dict[str, Any]:
        run = self.run_state
        if run is None:
            return {"step": 0, "steps": 0, "finished": False}
        last = self.spec.config.run.max_steps
        steps = min(run.line.steps, last) if last else run.line.steps
        return {"step": run.step, "steps": steps, "finished": run.flow.next >= run.end}

    def _questions(self) -> dict[str, tuple[Any, Any]]:
        """Actor name -> (handle, the method that tells how it is) of every actor that is up."""
        out = {t.name: (t.handle, t.handle.describe) for t in self.pool.targets.values() if t.handle is not None}
        if self.consumer.drafter is not None:
            out["drafter"] = (self.consumer.drafter, self.consumer.drafter.describe)
        if self.batcher is not None:
            out["batcher"] = (self.batcher, self.batcher.vitals)
        return out

    def _keep_asking(self) -> None:
        def ended(task: asyncio.Task) -> None:
            if not task.cancelled() and task.exception() is not None:
                error = task.exception()
                self.run_state.event("vitals_ended", f"{type(error).__name__}: {first_line(error)}; training goes on without them")

        task = asyncio.ensure_future(self.vitals.watch(self._status))
        self.tasks.add(task)
        task.add_done_callback(ended)

    async def status(self) -> dict[str, Any]:
        """Everything `jobs.status` shows, from memory: nobody is asked, so nobody can keep it waiting."""
        return self._status()

    def _actors(self) -> list[dict[str, Any]]:
        """One line per actor: state, restarts, batches, tokens/s, and its vitals."""
        drafter, batcher = self.consumer, self.batcher
        rows = [
            *self.pool.table(),
            {
                "name": "drafter",
                "state": "starting" if drafter.drafter is None or not drafter.facts else "working",
                "restarts": drafter.budget.total,
                "batches": drafter.batches,
                "tokens_per_second": drafter.tokens_per_second,
            },
            {"name": "batcher", "state": "starting" if batcher is None else "working", "restarts": self.batcher_budget.total},
            {"name": "coordinator", "state": "working", "restarts": 0},
        ]
        return [{**row, **self.vitals.of(row["name"])} for row in rows]

    def _status(self) -> dict[str, Any]:
        run = self.run_state
        if run is None or self.pool is None:
            return {"state": "starting", **self._progress(), "actors": [], "queues": {}, "last_step": {}}
        flow, power = run.flow, self.vitals.power
        return {
            "state": "ended" if self.ended.is_set() else "stopping" if run.stop_reason else "running" if self.ready else "starting",
            **self._progress(),
            "actors": self._actors(),
            "power": {"watts": power.total, "budget_watts": power.config.budget_watts, "parked": flow.parked()},
            "queues": {
                "q_pre": list(flow.queues().values()),
                "ahead": flow.ahead,
                "q_hs": flow.features_waiting(),
                "window_bytes": flow.window_used,
                "window_bytes_limit": flow.window_bytes,
                "window": flow.window,
            },
            "last_step": self.consumer.last_loss,
            "set_aside": len(run.aside),
        }

    def _summary(self, seconds: float, run: RunState) -> dict[str, Any]:
        last = self.consumer.last_loss
        return {
            "steps": run.step,
            "finished": run.flow.next >= run.end,
            "topology": self.spec.config.topology,
            "strategy": self.spec.strategy,
            "seconds": seconds,
            "loss": last.get("loss"),
            "training_tau": last.get("tau"),
            "real_tokens_per_second": last.get("real_tokens_per_second"),
            "target_tokens_per_second": self.pool.tokens_per_second,
            "drafter_tokens_per_second": self.consumer.tokens_per_second,
            "padding_efficiency": run.meter.padding_efficiency,
            "joules": run.meter.joules(run.now()) or None,
            "tokens_per_joule": run.meter.tokens_per_joule(run.now()),
            "best_checkpoint": self.consumer.best_name,
            "best_validation_tau": self.consumer.best_tau,
            "set_aside": list(run.aside.values()),
            "restarts": sum(t["restarts"] for t in self.pool.table()) + self.consumer.budget.total + self.batcher_budget.total,
        }
