"""What a report shows of one run in words and tables: the few numbers at the top, steps by length, events, targets, environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import numpy as np

from dflash_ray.records import MOST, TIME
from dflash_ray.run.metric_records import Event, StepRecord, TrainedBatch, ValidationRecord

KINDS = {
    "trouble": ("spike", "skipped", "failed", "refused", "bad", "lost", "error", "given_up", "set_aside", "over_budget", "unreadable"),
    "restart": ("restart", "rewound", "resumed"),
    "scaling": ("scaled", "parked", "woken"),
    "checkpoint": ("checkpoint",),
}


def finite(values: Iterable[Any]) -> list[float]:
    return [value for value in values if isinstance(value, int | float) and abs(value) < MOST]


def mean(values: Iterable[Any]) -> float | None:
    numbers = finite(values)
    return sum(numbers) / len(numbers) if numbers else None


def headline(
    records: list[StepRecord],
    validation: list[ValidationRecord],
    summary: dict[str, Any],
    events: list[Event],
    hours: np.ndarray,
) -> list[dict[str, Any]]:
    """The few numbers at the top, ready to be read."""
    last, real = records[-1], sum(record.real_tokens for record in records)
    padded = sum(record.padded_tokens for record in records)
    best = max(validation, key=lambda record: record.tau, default=None)
    settled = records[len(records) // 4 :]
    seconds = sum(record.seconds for record in settled)
    rate = sum(record.real_tokens for record in settled) / seconds if seconds else None
    restarts = sum(event.event.endswith("restart") for event in events)
    state = "finished" if summary.get("finished") else "failed" if "failed" in summary else "stopped" if summary else "not ended"
    return [
        {"name": "state", "value": state, "note": summary.get("topology", "")},
        {"name": "steps", "value": f"{last.step:,}", "note": f"{_big(real)} real tokens"},
        {"name": "loss", "value": f"{last.loss_smooth:.3f}", "note": "smoothed, at the end"},
        {"name": "tau", "value": f"{mean([record.tau for record in settled[-50:]]) or 0:.2f}", "note": "training, last steps"},
        {
            "name": "best held-out tau",
            "value": f"{best.tau:.2f}" if best else "none",
            "note": f"step {best.step:,}" if best else "no validation yet",
        },
        {"name": "tokens/s", "value": _big(rate), "note": "real, settled"},
        {"name": "padding efficiency", "value": f"{real / padded:.1%}" if padded else "none", "note": "real / allocated"},
        {"name": "training time", "value": _duration(float(hours[-1]) * 3600), "note": f"{restarts} restart{'' if restarts == 1 else 's'}"},
    ]


def bucket_table(records: list[StepRecord], groups: list[tuple[str, list[int]]]) -> list[dict[str, Any]]:
    out = []
    for name, indices in groups:
        chosen = [records[i] for i in indices]
        real, padded = sum(record.real_tokens for record in chosen), sum(record.padded_tokens for record in chosen)
        late = chosen[-max(1, len(chosen) // 5) :]
        out.append(
            {
                "name": name,
                "steps": len(chosen),
                "tokens": real,
                "mean_length": mean([record.mean_document_tokens for record in chosen]),
                "padding_efficiency": real / padded if padded else None,
                "loss": mean([record.loss for record in late]),
                "tau": mean([record.tau for record in late]),
                "accuracy": mean([record.accuracy for record in late]),
            }
        )
    return out


def by_target(trained: list[TrainedBatch]) -> list[dict[str, Any]]:
    counts = Counter(record.target for record in trained)
    return [{"name": name, "batches": count} for name, count in sorted(counts.items())]


def event_row(event: Event) -> dict[str, Any]:
    kind = next((kind for kind, words in KINDS.items() if any(word in event.event for word in words)), "other")
    return {"event": event.event, "kind": kind, "reason": event.reason or "", "time": utc(event.time)}


def environment_rows(info: dict[str, Any]) -> dict[str, Any]:
    environment = info.get("environment")
    environment = environment if isinstance(environment, dict) else {}
    machine = {key: value for key, value in environment.items() if key != "versions"}
    machine["gpus"] = ", ".join(environment.get("gpus") or []) or "none"
    versions = {name: value or "not installed" for name, value in (environment.get("versions") or {}).items()}
    place = {name: info[name] for name in ("node", "ray_address", "namespace") if name in info}
    if TIME[1](info.get("started")):
        place["started"] = utc(info["started"]) + " UTC"
    return {**place, **machine, **versions}


def utc(seconds: float | None) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S") if seconds else ""


def _big(value: float | None) -> str:
    if value is None:
        return "none"
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e4, " K")):
        if value >= size:
            return f"{value / (1e3 if unit == ' K' else size):.3g}{unit}"
    return f"{value:,.0f}"


def _duration(seconds: float) -> str:
    if seconds >= 86400:
        return f"{seconds / 86400:.1f} d"
    return f"{int(seconds // 3600)}:{int(seconds // 60 % 60):02d}:{int(seconds % 60):02d}"
