"""The lines of a run's files, one kind of record for each file.

Who writes such a line makes the record; who reads one gets the record back, or one line that says which file was damaged. Units stand in
each record's docstring; steps count from 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dflash_ray.records import (
    COUNT,
    COUNTS,
    FINITE,
    NUMBER,
    NUMBERS,
    TEXT,
    TIME,
    Record,
    key,
    optional_key,
    or_null,
    other_keys,
)
from dflash_ray.run.folder import EVENTS, METRICS, TRAINED, VALIDATION, RunFolder


@dataclass(frozen=True, kw_only=True)
class DraftMetrics(Record):
    """What the drafter predicted, over the batches of a step or of a validation pass (`draft.loss.step_metrics`).

    Losses are nats per what their objective is divided by (docs/dflash.md); `tau` and `slot_accuracy` (slots 1..K-1) are of teacher-forced
    blocks, `replay_tau` is told by a validation with a block at every place.
    """

    step: int = key(COUNT)
    loss: float = key(NUMBER)
    ce: float = key(NUMBER)
    dpace: float = key(NUMBER)
    kl: float | None = optional_key(NUMBER)
    tv: float | None = optional_key(NUMBER)
    dpace_kl: float | None = optional_key(NUMBER)
    accuracy: float = key(NUMBER)
    tau: float = key(NUMBER)
    replay_tau: float | None = optional_key(NUMBER)
    tau_blocks: float = key(NUMBER)
    supervised_tokens_covered: float = key(NUMBER)
    slot_accuracy: list[float] = key(NUMBERS)


@dataclass(frozen=True, kw_only=True)
class StepRecord(DraftMetrics):
    """One optimizer step, a line of metrics.jsonl.

    Tokens and `supervised_tokens` are counts of the step; rates are per second over a sliding window, waits are shares of time, `watts` is
    of all devices. `q_pre`, `ahead`, `q_hs` count batches, `window_bytes` bytes of features in flight. `seconds` is the step's own time,
    `time` a monotonic clock in seconds.
    """

    lr: float = key(NUMBER)
    noise_std: float = key(NUMBER)
    grad_norm: float = key(NUMBER)
    skipped: str | None = key(or_null(TEXT))  # no_label or non_finite
    loss_smooth: float = key(NUMBER)
    supervised_tokens: int = key(COUNT)
    real_tokens: int = key(COUNT)
    padded_tokens: int = key(COUNT)
    real_tokens_per_second: float = key(FINITE)
    padded_tokens_per_second: float = key(FINITE)
    drafter_wait: float = key(FINITE)
    target_wait: float = key(FINITE)
    watts: float | None = key(or_null(FINITE))
    tokens_per_joule: float | None = key(or_null(FINITE))
    mean_document_tokens: float = key(FINITE)
    buckets: list[int] = key(COUNTS)
    q_pre: list[int] = key(NUMBERS)
    ahead: int = key(COUNT)
    q_hs: int = key(COUNT)
    window_bytes: int = key(COUNT)
    targets: int = key(COUNT)
    parked: int = key(COUNT)
    spike: float | None = key(or_null(NUMBER))  # times the rolling median of the loss
    seconds: float = key(FINITE)
    eta_seconds: float | None = key(or_null(FINITE))
    time: float = key(FINITE)


@dataclass(frozen=True, kw_only=True)
class ValidationRecord(DraftMetrics):
    """One validation pass after `step` steps, over held-out samples; a line of validation.jsonl."""


@dataclass(frozen=True, kw_only=True)
class TrainedBatch(Record):
    """One batch whose gradient is in the weights, a line of trained.jsonl. `arrival` numbers the batches by when their features came."""

    batch: int = key(COUNT)
    step: int = key(COUNT)
    sample_ids: list[int] = key(COUNTS)
    target: str = key(TEXT)
    arrival: int = key(COUNT)


@dataclass(frozen=True, kw_only=True)
class Event(Record):
    """Something that happened after `step` steps, a line of events.jsonl. `time` is in seconds since 1970; `details` differ by event."""

    event: str = key(TEXT)
    step: int = key(COUNT)
    time: float = key(TIME)
    reason: str = key(TEXT)
    details: dict[str, Any] = other_keys()


@dataclass(frozen=True, kw_only=True)
class QuarantinedBatch(Record):
    """A training batch that nobody could compute: it counts as empty. In checkpoints and the summary under `set_aside`."""

    batch: int = key(COUNT)
    sample_ids: list[int] = key(COUNTS)
    reason: str = key(TEXT)


FILES: dict[str, type[Record]] = {METRICS: StepRecord, VALIDATION: ValidationRecord, EVENTS: Event, TRAINED: TrainedBatch}
AnyRecord = TypeVar("AnyRecord", bound=Record)


def read_steps(run: RunFolder, *needed: str) -> list[StepRecord]:
    return _read(run, METRICS, StepRecord, needed)


def read_validations(run: RunFolder, *needed: str) -> list[ValidationRecord]:
    return _read(run, VALIDATION, ValidationRecord, needed)


def read_trained(run: RunFolder, *needed: str) -> list[TrainedBatch]:
    return _read(run, TRAINED, TrainedBatch, needed)


def read_events(run: RunFolder, *needed: str) -> list[Event]:
    return _read(run, EVENTS, Event, needed)


def _read(run: RunFolder, name: str, kind: type[AnyRecord], needed: Sequence[str]) -> list[AnyRecord]:
    """All whole lines of `name`, each with the keys `needed`. ValueError for a line that no run has written."""
    path = run.path / name
    try:
        lines = run.read(name)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        records = [kind.from_json(line, f"record {number}", *needed) for number, line in enumerate(lines, 1)]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if len({len(slots) for record in records if (slots := getattr(record, "slot_accuracy", None))}) > 1:
        raise ValueError(f"{path}: slot_accuracy differs in length from record to record; the file was damaged")
    return records
