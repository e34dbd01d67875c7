"""What one optimizer step adds up to: its batches, its record in the files, on the console and in tracking, and what is odd about it."""

from __future__ import annotations

from typing import Any

from actors.answers import RunFailed
from actors.coordinator.run_state import HeldFeatures, RunState
from dflash_ray.data.batches.batch import BatchInfo
from dflash_ray.pipeline.order import Item
from dflash_ray.run.folder import METRICS, TRAINED, VALIDATION
from dflash_ray.run.metric_records import StepRecord, TrainedBatch, ValidationRecord
from dflash_ray.watch.console import balance_advice, console_line
from dflash_ray.watch.meter import StepTally


class Steps:
    def __init__(self, run: RunState, total_steps: int):
        self.run, self.total_steps = run, total_steps
        self.tally = StepTally()
        self.trained: list[TrainedBatch] = []  # of the step in progress
        self.skipped_in_a_row = 0
        self.last: StepRecord | None = None
        self.began = run.now()
        self.batches = 0
        self._tokens, self._seconds = 0, 0.0  # of micro-steps and optimizer steps

    def forget(self) -> None:
        """The step in progress begins again."""
        self.tally, self.trained = StepTally(), []

    def add(self, item: Item, info: BatchInfo, features: HeldFeatures, seconds: float) -> None:
        """A micro-step of `seconds` on `item`, with `features` of a target."""
        self.batches += 1
        self._tokens += info.tokens
        self._seconds += seconds
        self.tally.add(info)
        made = {"target": features.info.target, "arrival": features.arrival}
        self.trained.append(TrainedBatch(batch=item.number, step=item.step + 1, sample_ids=info.sample_ids, **made))

    def end(self, step: int, metrics: dict[str, Any], seconds: float) -> None:
        """Optimizer step `step` (0-based), which took `seconds` and gave `metrics`, is done: in all files it is number step + 1."""
        run = self.run
        run.step = step + 1
        now = run.now()
        self._seconds += seconds
        tally, self.tally = self.tally, StepTally()
        rates = run.meter.step(now, tally.real_tokens, tally.padded_tokens)
        tokens_left = max(run.meter.total_tokens - run.meter.done_tokens, 0)
        length, parked = tally.real_tokens / max(tally.documents, 1), len(run.flow.parked())
        spike = None if metrics["skipped"] else run.meter.spike(metrics["loss"], length)
        record = StepRecord(
            step=run.step,
            **metrics,
            loss_smooth=run.meter.smooth(metrics["loss"], tally.supervised),
            supervised_tokens=tally.supervised,
            real_tokens=tally.real_tokens,
            padded_tokens=tally.padded_tokens,
            **rates,
            mean_document_tokens=length,
            buckets=sorted(tally.buckets),
            q_pre=list(run.flow.queues().values()),
            ahead=run.flow.ahead,
            q_hs=run.flow.features_waiting(),
            window_bytes=run.flow.window.used,
            targets=len(run.flow.targets) - parked,
            parked=parked,
            spike=spike["factor"] if spike else None,
            seconds=now - self.began,
            eta_seconds=run.meter.eta_seconds(tokens_left, rates["real_tokens_per_second"]),
            time=now,
        )
        self.began = now
        trained, self.trained = self.trained, []
        run.append(TRAINED, *trained)
        run.append(METRICS, record)
        run.tracker.log("train", record.values())
        run.ray_metrics.step(record)
        run.say(console_line(record, self.total_steps))
        self.last = record
        self._look_at(record, tally, spike)

    def _look_at(self, record: StepRecord, tally: StepTally, spike: dict[str, float] | None) -> None:
        run = self.run
        if record.skipped:
            self.skipped_in_a_row += 1
            run.event("step_skipped", f"step {run.step}: {record.skipped}", sample_ids=tally.sample_ids)
            if self.skipped_in_a_row >= run.spec.config.train.max_skipped_steps:
                raise RunFailed(f"{self.skipped_in_a_row} steps in a row were skipped, last: {record.skipped}")
            return
        self.skipped_in_a_row = 0
        if spike is not None:
            reason = (
                f"loss {record.loss:.3f} is {spike['factor']:.1f} times the rolling median; documents of "
                f"{record.mean_document_tokens:,.0f} tokens, usual are {spike['usual_tokens']:,.0f}"
            )
            run.event("spike", reason, sample_ids=tally.sample_ids, buckets=record.buckets)
        advice = balance_advice(record.drafter_wait, record.target_wait, record.targets, record.parked)
        if advice is not None and run.step % 20 == 0:
            run.say(advice)

    def validated(self, step: int, metrics: dict[str, float]) -> None:
        """A validation pass after `step` steps."""
        run = self.run
        record = ValidationRecord(step=step, **metrics)
        run.append(VALIDATION, record)
        run.tracker.log("validation", record.values())
        replayed = f" replay_tau {metrics['replay_tau']:.3f}" if "replay_tau" in metrics else ""
        run.say(f"validation at step {step}: tau {metrics['tau']:.3f}{replayed} loss {metrics['loss']:.3f} acc {metrics['accuracy']:.3f}")

    @property
    def tokens_per_second(self) -> float:
        """Of the drafter while it trains: micro-steps and optimizer steps, no waiting."""
        return self._tokens / self._seconds if self._seconds else 0.0
