"""What a run tells about itself while it runs and at its end, all from the coordinator's memory."""

from __future__ import annotations

from typing import Any

from actors.coordinator.drafter_loop import DrafterLoop
from actors.coordinator.fetcher import Fetcher
from actors.coordinator.run_state import RunState
from actors.coordinator.targets import TargetPool
from actors.coordinator.vitals import VitalsWatch


class RunStatus:
    def __init__(self, run: RunState, pool: TargetPool, drafter_loop: DrafterLoop, fetcher: Fetcher, vitals: VitalsWatch):
        self.run, self.pool, self.drafter_loop, self.fetcher, self.vitals = run, pool, drafter_loop, fetcher, vitals

    def progress(self) -> dict[str, Any]:
        run = self.run
        last = run.spec.config.run.max_steps
        steps = min(run.order.steps, last) if last else run.order.steps
        return {"step": run.step, "steps": steps, "finished": run.flow.next >= run.end}

    def _actors(self) -> list[dict[str, Any]]:
        """One line per actor: state, restarts, batches, tokens/s, and its vitals."""
        drafter, steps, batcher = self.drafter_loop.drafter, self.drafter_loop.steps, self.fetcher.batcher
        rows = [
            *self.pool.table(),
            {
                "name": "drafter",
                "state": "working" if drafter.handle is not None and drafter.answered else "starting",
                "restarts": drafter.budget.total,
                "batches": steps.batches,
                "tokens_per_second": steps.tokens_per_second,
            },
            {"name": "batcher", "state": "starting" if batcher is None else "working", "restarts": self.fetcher.budget.total},
            {"name": "coordinator", "state": "working", "restarts": 0},
        ]
        return [{**row, **self.vitals.of(row["name"])} for row in rows]

    def status(self, state: str) -> dict[str, Any]:
        """Everything `jobs.status` shows of a run in `state`."""
        run = self.run
        flow, power = run.flow, self.vitals.power
        return {
            "state": state,
            **self.progress(),
            "actors": self._actors(),
            "power": {"watts": power.total, "budget_watts": power.config.budget_watts, "parked": flow.parked()},
            "queues": {
                "q_pre": list(flow.queues().values()),
                "ahead": flow.ahead,
                "q_hs": flow.features_waiting(),
                "window_bytes": flow.window.used,
                "window_bytes_limit": flow.window.most_bytes,
                "window": flow.window.size,
            },
            "last_step": last.values() if (last := self.drafter_loop.steps.last) else {},
            "set_aside": len(run.quarantined),
        }

    def summary(self, seconds: float) -> dict[str, Any]:
        """Of a run that trained for `seconds`."""
        run, last, checkpoints = self.run, self.drafter_loop.steps.last, self.drafter_loop.checkpoints
        return {
            "steps": run.step,
            "finished": run.flow.next >= run.end,
            "topology": run.spec.config.topology,
            "strategy": run.spec.strategy,
            "seconds": seconds,
            "loss": last.loss if last else None,
            "training_tau": last.tau if last else None,
            "real_tokens_per_second": last.real_tokens_per_second if last else None,
            "target_tokens_per_second": self.pool.tokens_per_second,
            "drafter_tokens_per_second": self.drafter_loop.steps.tokens_per_second,
            "padding_efficiency": run.meter.padding_efficiency,
            "joules": run.meter.joules(run.now()) or None,
            "tokens_per_joule": run.meter.tokens_per_joule(run.now()),
            "best_checkpoint": checkpoints.best_name,
            "best_validation_tau": checkpoints.best_tau,
            "best_by": checkpoints.best_by,
            "set_aside": [batch.values() for batch in run.quarantined.values()],
            "restarts": sum(t["restarts"] for t in self.pool.table()) + self.drafter_loop.drafter.budget.total + self.fetcher.budget.total,
        }
