"""What a report shows of one run, read from its folder: plain values that fit into JSON.

Every series stands over the run's optimizer steps, with three possible positions of each: step, real tokens trained, and hours of training
(the sum of the steps' own seconds, so that a night between a stop and its resume takes no room). Events stand at the step after which they
happened. Long runs are thinned to means of neighbouring steps; the smallest and largest loss of each group are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from dflash_ray.json_file import read_json_object
from dflash_ray.run.folder import METRICS, RunFolder
from dflash_ray.run.metric_records import StepRecord, ValidationRecord, read_events, read_steps, read_trained, read_validations
from dflash_ray.watch.report.tables import bucket_table, by_target, environment_rows, event_row, finite, headline, mean

POINTS = 1500  # of a series at most
LENGTH_GROUPS = 4  # of steps by mean document length, where batches have no buckets
MOST_EVENTS = 500
STEP_NEEDS = ("step", "real_tokens", "padded_tokens", "seconds", "loss", "loss_smooth", "tau", "accuracy", "mean_document_tokens")
SERIES = (
    "loss",
    "loss_smooth",
    "tau",
    "accuracy",
    "lr",
    "grad_norm",
    "real_tokens_per_second",
    "padded_tokens_per_second",
    "drafter_wait",
    "target_wait",
    "ahead",
    "q_hs",
    "targets",
    "watts",
    "tokens_per_joule",
    "mean_document_tokens",
)


def gather(folder: Path) -> dict[str, Any]:
    """ValueError where `folder` holds no run, or none that has made a step."""
    run = RunFolder(folder)
    if not run.holds_a_run():
        raise ValueError(f"--run {folder}: holds no run; give the folder of a run")
    records = read_steps(run, *STEP_NEEDS)
    if not records:
        raise ValueError(f"--run {folder}: {METRICS} holds no step yet; a report needs at least one")
    summary, info = _json(folder / "summary.json"), _json(folder / "run.json")
    tokens = np.cumsum([record.real_tokens for record in records])
    hours = np.cumsum([record.seconds for record in records]) / 3600
    axis = _Axis([record.step for record in records], tokens, hours)
    groups = _length_groups(records)
    validation = read_validations(run, "step", "tau")
    events = read_events(run, "step", "event")
    config = _text(folder / "config.yaml")
    return _clean(
        {
            "name": folder.resolve().name,
            "headline": headline(records, validation, summary, events, hours),
            "series": _series(records, tokens, hours),
            "lengths": _length_lines(records, groups, tokens, hours),
            "slots": _slots(records, tokens, hours),
            "validation": [{**axis.at(record.step), **_numbers(record)} for record in validation],
            "events": [{**axis.at(event.step), **event_row(event)} for event in events[-MOST_EVENTS:]],
            "buckets": bucket_table(records, groups),
            "targets": by_target(read_trained(run, "target")),
            "config": config,
            "environment": environment_rows(info),
            "summary": summary,
        }
    )


class _Axis:
    """Where a step lies on the three axes; step 0 is the beginning."""

    def __init__(self, steps: list[int], tokens: np.ndarray, hours: np.ndarray):
        self.steps, self.tokens, self.hours = np.array(steps), tokens, hours

    def at(self, step: int) -> dict[str, float]:
        index = int(np.searchsorted(self.steps, step, side="right")) - 1
        if index < 0:
            return {"step": step, "tokens": 0, "hours": 0.0}
        return {"step": step, "tokens": int(self.tokens[index]), "hours": float(self.hours[index])}


def _series(records: list[StepRecord], tokens: np.ndarray, hours: np.ndarray) -> dict[str, list]:
    parts = _parts(len(records))
    out = _ends(records, tokens, hours, parts)
    columns = {name: [getattr(record, name) for record in records] for name in SERIES}
    columns["q_pre"] = [sum(record.q_pre or []) for record in records]
    columns["window_mb"] = [record.window_bytes / 1e6 if record.window_bytes is not None else None for record in records]
    for name, values in columns.items():
        if any(value is not None for value in values):
            out[name] = [mean(values[part]) for part in parts]
    out["loss_least"] = [_extreme(columns["loss"][part], min) for part in parts]
    out["loss_most"] = [_extreme(columns["loss"][part], max) for part in parts]
    return out


def _ends(records: list[StepRecord], tokens: np.ndarray, hours: np.ndarray, parts: list[slice]) -> dict[str, list]:
    """Positions of each part's last step."""
    last = [part.stop - 1 for part in parts]
    return {
        "step": [records[index].step for index in last],
        "tokens": [int(tokens[index]) for index in last],
        "hours": [float(hours[index]) for index in last],
    }


def _parts(count: int, points: int = POINTS) -> list[slice]:
    bounds = np.linspace(0, count, min(count, points) + 1).round().astype(int)
    return [slice(int(a), int(b)) for a, b in zip(bounds, bounds[1:], strict=False)]


def _extreme(values: Iterable[Any], pick: Any) -> float | None:
    numbers = finite(values)
    return pick(numbers) if numbers else None


def _slots(records: list[StepRecord], tokens: np.ndarray, hours: np.ndarray) -> dict[str, Any]:
    """Accuracy of slots 1.. over the run (few points, they are many lines) and over its last tenth."""
    having = [(i, record.slot_accuracy) for i, record in enumerate(records) if record.slot_accuracy]
    if not having:
        return {}
    indices = [i for i, _ in having]
    chosen, values = [records[i] for i in indices], np.array([slots for _, slots in having], dtype=float)
    parts = _parts(len(having), 200)
    late = values[-max(1, len(values) // 10) :]
    return {
        **_ends(chosen, tokens[indices], hours[indices], parts),
        "lines": [[mean(values[part, slot].tolist()) for part in parts] for slot in range(values.shape[1])],
        "late": [mean(late[:, slot].tolist()) for slot in range(values.shape[1])],
    }


def _length_groups(records: list[StepRecord]) -> list[tuple[str, list[int]]]:
    """(name, indices of records): by bucket where every step is of one bucket, else quarters by mean document length."""
    buckets = [record.buckets or [] for record in records]
    if all(len(one) == 1 for one in buckets):
        names = sorted({one[0] for one in buckets})
        return [(f"bucket {name}", [i for i, one in enumerate(buckets) if one[0] == name]) for name in names]
    lengths = np.array([record.mean_document_tokens for record in records])
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, LENGTH_GROUPS + 1)))
    if len(edges) < 3:
        return [("all", list(range(len(records))))]
    which = np.clip(np.searchsorted(edges, lengths, side="left") - 1, 0, len(edges) - 2)
    groups = range(len(edges) - 1)
    return [(f"{edges[i]:,.0f} to {edges[i + 1]:,.0f} tokens", np.flatnonzero(which == i).tolist()) for i in groups]


def _length_lines(
    records: list[StepRecord], groups: list[tuple[str, list[int]]], tokens: np.ndarray, hours: np.ndarray
) -> list[dict[str, Any]]:
    out = []
    for name, indices in groups:
        chosen = [records[i] for i in indices]
        parts = _parts(len(chosen), POINTS // 4)
        losses = [record.loss for record in chosen]
        line = _ends(chosen, tokens[indices], hours[indices], parts)
        out.append({"name": name, **line, "loss": [mean(losses[part]) for part in parts]})
    return out


def _numbers(record: ValidationRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in ("loss", "tau", "accuracy", "slot_accuracy")}


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except (FileNotFoundError, ValueError):
        return {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None


def _clean(value: Any) -> Any:
    """Without what JSON cannot say: a number that is none becomes null."""
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
