"""CoordinatorActor: owns the channels and the refs, spawns and heals the others, measures and reports. Its loops never block."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import ray

from actors.answers import ActorLost, RunFailed, first_line
from actors.batcher import BatcherActor
from actors.coordinator.drafter_loop import DrafterLoop
from actors.coordinator.fetcher import Fetcher
from actors.coordinator.power import PowerWatch
from actors.coordinator.quarantine import earlier_quarantined
from actors.coordinator.run_state import ActorClasses, RunState
from actors.coordinator.run_status import RunStatus
from actors.coordinator.targets import TargetPool
from actors.coordinator.vitals import VitalsWatch
from actors.drafter import DrafterActor
from actors.placement import environment, gpus_wanted, hide_gpus, refuse_too_many_processes
from actors.ray_metrics import RayMetrics
from actors.target import TargetActor
from dflash_ray.pipeline.flow import Flow
from dflash_ray.pipeline.order import BatchOrder
from dflash_ray.run.checkpoint import RunIdentity, read_checkpoint, remove_leftovers
from dflash_ray.run.checks import check_identity, window_bytes
from dflash_ray.run.folder import RunFolder
from dflash_ray.run.place import RunInfo
from dflash_ray.run.spec import RunSpec
from dflash_ray.watch.meter import Meter
from dflash_ray.watch.tracking import Tracker

LOCK_PATIENCE = 60.0  # seconds for the actors of a killed driver to end
ACTOR_CLASSES = ActorClasses(BatcherActor, TargetActor, DrafterActor)
NOTHING = {"step": 0, "steps": 0, "finished": False}  # done yet


@ray.remote
class CoordinatorActor:
    def __init__(self, spec: RunSpec, resume: Path | None, store_bytes: int, info: RunInfo, classes: ActorClasses | None = None):
        hide_gpus()
        self.spec, self.resume, self.store_bytes, self.info, self.classes = spec, resume, store_bytes, info, classes or ACTOR_CLASSES
        self.run_state: RunState | None = None
        self.pool: TargetPool | None = None
        self.drafter_loop: DrafterLoop | None = None
        self.run_status: RunStatus | None = None
        self.fetcher = Fetcher(spec, self.classes.batcher, self.pump)
        self.early_stop: str | None = None
        self.ready = False  # every actor but the targets is up, the flow may move
        self.ended = asyncio.Event()

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
            await self.drafter_loop.consume()
            await self.drafter_loop.checkpoints.close()
            await asyncio.to_thread(run.tracker.close)
            return self.run_status.summary(time.time() - began)
        except ActorLost as error:
            raise RunFailed(str(error)) from None
        except OSError as error:
            raise RunFailed(f"run folder {self.spec.run_dir}: {error.strerror or error}") from None
        finally:
            if self.pool is not None:
                self.pool.close()
                self.vitals.close()
                self.watching.cancel()
            self.fetcher.close()
            self.ended.set()
            if self.run_state is not None:
                self.run_state.pulse.beat()

    async def _start(self) -> RunState:
        spec = self.spec
        plan = await self.fetcher.plan()
        config = spec.config
        order = BatchOrder(plan.batches, config.train.batches_per_step, config.validation.every_steps, plan.validation_batches)
        end = order.total
        if config.run.max_steps is not None and config.run.max_steps < order.steps:
            end = order.position(config.run.max_steps * order.batches_per_step)
        flow = Flow(
            end,
            window=spec.window,
            window_bytes=window_bytes(spec, self.store_bytes, plan),
            prefetch=config.flow.prefetch_batches,
            queue_per_target=config.flow.queue_per_target,
            slow_factor=config.flow.slow_factor,
            fetch_group=self.fetcher.group,
        )
        identity = RunIdentity(plan.plan, plan.dataset, spec.weights, order.batches_per_step, config.run.seed)
        if self.resume is not None:
            check_identity(spec, read_checkpoint(self.resume), identity, order.steps)
        folder, told = RunFolder(spec.run_dir), self._later
        await self._lock(folder)
        folder.create(config, self.info.as_json())
        remove_leftovers(folder.checkpoints)
        meter, tracker, metrics = Meter(plan.tokens), Tracker(config, folder.path, told), RayMetrics(config.run.name)
        run = self.run_state = RunState(spec, folder, order, flow, meter, tracker, end, self.classes, metrics)
        run.feature_slot_bytes = plan.most_tokens * spec.shape.features * spec.feature_bytes
        run.most_tokens, run.most_anchors = plan.most_tokens, plan.most_anchors
        run.stop_reason = self.early_stop
        self.fetcher.run = run
        self.drafter_loop = DrafterLoop(run, self.pump, order.steps, identity, self.resume)
        self.pool = TargetPool(run, self.pump, self.drafter_loop.drafter)
        self.vitals = VitalsWatch(run, PowerWatch(run, self.pool), metrics, self._questions)
        self.run_status = RunStatus(run, self.pool, self.drafter_loop, self.fetcher, self.vitals)
        self._keep_asking()
        run.say(
            f"{plan.samples:,} samples, {plan.batches:,} batches ({spec.strategy}: {spec.strategy_reason}), {order.steps:,} steps; "
            f"starting {config.targets} target{'s' if config.targets > 1 else ''} and 1 drafter on {spec.device}"
        )
        run.say("environment of every actor: " + " ".join(f"{name}={value}" for name, value in sorted(environment(spec).items())))
        if self.resume is not None:
            run.quarantined = earlier_quarantined(run)
        starting = asyncio.ensure_future(self.drafter_loop.begin())
        self.pool.resize(config.targets)
        next_batch = await starting
        if next_batch:
            flow.skip_to(order.position(next_batch))
        run.rewind_files(next_batch)
        run.meter.skip(plan.tokens * next_batch // max(plan.batches, 1))
        if self.resume is not None:
            run.event("resumed", f"from {self.resume}: step {run.step}, next batch {next_batch}", batch=next_batch)
        run.meter.start(run.now())
        self.drafter_loop.steps.began = run.now()
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

    # ---- the pump ------------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """After every change: let go of what nobody needs, fetch what is wanted, start what may start, wake who waits."""
        run = self.run_state
        if not self.ready or run.failure is not None:
            return
        for position in run.flow.take_dropped():
            run.batches.pop(position, None)
            if (dropped := run.features.pop(position, None)) is not None:
                run.let_go(dropped)
        if self.fetcher.batcher is not None:
            self.fetcher.fetch(run.flow.wanted())
        for name, position in run.flow.assign():
            self.pool.compute(name, position)
        run.pulse.beat()

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
        if targets > self.pool.wanted:
            cluster = await asyncio.to_thread(ray.cluster_resources)
            gpus = cluster.get("GPU", 0.0)
            wanted = gpus_wanted(targets, placement.gpus_per_target, placement.gpus_per_drafter)
            if self.spec.device == "cuda" and wanted > gpus:
                raise ValueError(f"targets: {targets} and the drafter want {wanted:g} GPUs, the cluster has {gpus:g}")
            if self.spec.device == "cpu":
                refuse_too_many_processes("targets", targets, cluster)
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
        return {"lines": lines, "ended": self.ended.is_set(), **(self.run_status.progress() if self.run_status else NOTHING)}

    def _questions(self) -> dict[str, tuple[Any, Any]]:
        """Actor name -> (handle, the method that tells how it is) of every actor that is up."""
        out = {t.name: (t.handle, t.handle.vitals) for t in self.pool.targets.values() if t.handle is not None}
        if (drafter := self.drafter_loop.drafter.handle) is not None:
            out["drafter"] = (drafter, drafter.vitals)
        if (batcher := self.fetcher.batcher) is not None:
            out["batcher"] = (batcher, batcher.vitals)
        return out

    def _keep_asking(self) -> None:
        def ended(task: asyncio.Task) -> None:
            if not task.cancelled() and task.exception() is not None:
                error = task.exception()
                self.run_state.event("vitals_ended", f"{type(error).__name__}: {first_line(error)}; training goes on without them")

        self.watching = asyncio.ensure_future(self.vitals.watch(self._status))
        self.watching.add_done_callback(ended)

    async def status(self) -> dict[str, Any]:
        """Everything `jobs.status` shows, from memory: nobody is asked, so nobody can keep it waiting."""
        return self._status()

    def _status(self) -> dict[str, Any]:
        if self.run_status is None:
            return {"state": "starting", **NOTHING, "actors": [], "queues": {}, "last_step": {}}
        stopping = self.run_state.stop_reason is not None
        return self.run_status.status(
            "ended" if self.ended.is_set() else "stopping" if stopping else "running" if self.ready else "starting"
        )
