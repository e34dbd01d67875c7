"""The checkpoints of a run: when one is due, its snapshot between two steps, its writing while training goes on, and which is the best."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from actors.answers import ActorLost, RunFailed, cause_of, first_line
from actors.coordinator.drafter_process import DrafterProcess
from actors.coordinator.run_state import RunState
from dflash_ray.run.checkpoint import BestCheckpoint, CheckpointMeta, RunIdentity, prune

NOTHING_BEST = {"best_tau": None, "best_by": "tau", "best_name": None}
NOT_YET = {"trainer": {}, "shape": {}, "state_bytes": 0, "state_digest": ""}  # the drafter adds them when it writes


class Checkpoints:
    """`identity` goes into every checkpoint: a run that continues from it must have the same."""

    def __init__(self, run: RunState, drafter: DrafterProcess, identity: RunIdentity):
        self.run, self.drafter, self.identity = run, drafter, identity
        self.best_tau: float | None = None
        self.best_by = "tau"  # or replay_tau, which is what serving gains, where validation tells it
        self.best_name: str | None = None
        self.last = run.now()
        self.step: int | None = None  # of the last one taken
        self.writing: asyncio.Task | None = None
        self.written_step = 0  # of the newest one on disk
        self.not_written = ""  # why a later one is not

    def adopt(self, meta: CheckpointMeta) -> None:
        """The run is back at the checkpoint that `meta` tells of."""
        self.best_tau, self.best_by, self.best_name = meta.best_tau, meta.best_by, meta.best_name
        self.step = self.written_step = meta.step
        self.not_written = ""

    def meta(self, step: int, next_batch: int) -> CheckpointMeta:
        """Of a checkpoint that is taken now; of step 0, where the run has nothing behind it yet."""
        best = {"best_tau": self.best_tau, "best_by": self.best_by, "best_name": self.best_name}
        return CheckpointMeta(
            step=step,
            next_batch=next_batch,
            set_aside=[batch.values() for batch in self.run.quarantined.values()],
            **(best if step else NOTHING_BEST),
            **asdict(self.identity),
            **NOT_YET,
        )

    async def take_if_due(self) -> None:
        run, config = self.run, self.run.spec.config.checkpoint
        if self.step == run.step:
            return
        if run.flow.next >= run.end:
            reason = "end of the run"
        elif run.stop_reason is not None:
            reason = run.stop_reason
        elif run.step % config.every_steps == 0:
            reason = f"every {config.every_steps} steps"
        elif run.now() - self.last >= config.every_minutes * 60:
            reason = f"every {config.every_minutes:g} minutes"
        else:
            return
        await self._take(reason)

    async def validated(self, step: int, metrics: dict[str, Any]) -> None:
        """Validation after `step` steps gave `metrics`: the best one so far gets a checkpoint."""
        by = "replay_tau" if "replay_tau" in metrics else "tau"
        if self.best_tau is None or by != self.best_by or metrics[by] > self.best_tau:
            self.best_tau, self.best_by, self.best_name = metrics[by], by, f"step-{step:08d}"
            await self._take(f"best validation {by} so far")

    async def _take(self, reason: str) -> None:
        """Takes the snapshot now, between two steps, and lets it be written while training goes on."""
        run = self.run
        await self.finish()
        await self.drafter.call(self.drafter.handle.snapshot.remote(), "snapshot")
        next_batch = min(run.step * run.order.batches_per_step, run.order.batches)
        meta = self.meta(run.step, next_batch)
        self.step, self.last = run.step, run.now()
        self.writing = asyncio.ensure_future(self._write(meta, reason))

    async def _write(self, meta: CheckpointMeta, reason: str) -> ActorLost | None:
        """Returns what the drafter's death says, if it died of it; the walk notices it too, unless it has ended."""
        run, began = self.run, self.run.now()
        try:
            await asyncio.to_thread(run.folder.sync)  # a checkpoint counts on the lines before it
            path = await self.drafter.timed(self.drafter.handle.write.remote(run.folder.checkpoints, meta), "checkpoint")
        except ActorLost as error:
            self.not_written = str(error)
            return error
        except (ray.exceptions.RayTaskError, OSError) as error:
            cause = cause_of(error) if isinstance(error, ray.exceptions.RayTaskError) else error
            self.not_written = first_line(cause)
            run.event("checkpoint_failed", f"step {meta.step}: {self.not_written}; training goes on, the last good one stays")
            return None
        self.written_step, self.not_written = meta.step, ""
        run.event("checkpoint", f"step {meta.step} ({reason})", path=path, seconds=run.now() - began)
        await asyncio.to_thread(prune, run.folder.checkpoints, run.spec.config.checkpoint.keep, self.best_name)
        if self.best_name == Path(path).name:
            try:
                best = BestCheckpoint(checkpoint=self.best_name, tau=self.best_tau, by=self.best_by)
                run.folder.write_json("best.json", best.as_json())
            except OSError as error:
                run.event("best_not_written", f"{self.best_name}: {error.strerror}")
        return None

    async def finish(self) -> ActorLost | None:
        writing, self.writing = self.writing, None
        return await writing if writing is not None else None

    async def close(self) -> None:
        """At the end. RunFailed if the state of the last step is on no disk."""
        await self.finish()
        if self.written_step != self.run.step:
            raise RunFailed(
                f"the checkpoint of step {self.run.step} could not be written: {self.not_written}; the last good one is of step "
                f"{self.written_step}"
            )
