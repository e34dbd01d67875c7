"""The lines of a run's files for those who only look at them: what they count on is there, or one line says which file was damaged."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dflash_ray.run.folder import EVENTS, METRICS, TRAINED, VALIDATION, RunFolder

MOST = 1e300  # sums and means of numbers below it are numbers
LATEST = 1e11  # seconds since 1970 that a calendar still knows

Check = tuple[str, Callable[[Any], bool]]  # what a value must be, whether it is


def _number(value: Any) -> bool:
    """A loss may be NaN or infinite: a step that was skipped had one."""
    return finite(value) or (isinstance(value, float) and not math.isfinite(value))


def finite(value: Any) -> bool:
    """Whether it is a number to calculate with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST


NUMBER: Check = ("a number", _number)
FINITE: Check = ("a finite number", finite)
COUNT: Check = ("a count", _count)
TEXT: Check = ("a text", lambda value: isinstance(value, str))
NUMBERS: Check = ("a list of numbers", lambda value: isinstance(value, list) and all(_number(one) for one in value))

CHECKS: dict[str, dict[str, Check]] = {
    METRICS: {
        **dict.fromkeys(("step", "supervised_tokens", "real_tokens", "padded_tokens", "targets", "window_bytes"), COUNT),
        **dict.fromkeys(("seconds", "time", "mean_document_tokens", "drafter_wait", "target_wait", "real_tokens_per_second"), FINITE),
        **dict.fromkeys(("loss", "loss_smooth", "tau", "accuracy"), NUMBER),
        **dict.fromkeys(("q_pre", "slot_accuracy"), NUMBERS),
        "watts": ("a number or null", lambda value: value is None or finite(value)),
    },
    VALIDATION: {"step": COUNT, "tau": NUMBER, "replay_tau": NUMBER, "loss": NUMBER, "slot_accuracy": NUMBERS},
    EVENTS: {"step": COUNT, "event": TEXT, "time": ("a time", lambda value: finite(value) and abs(value) < LATEST)},
    TRAINED: {"batch": COUNT, "target": TEXT},
}


def read_records(run: RunFolder, name: str, *needed: str) -> list[dict[str, Any]]:
    """All whole lines of `name`, one of the folder's files of lines, each with the keys `needed`. ValueError for one no run has written."""
    path = run.path / name
    try:
        records = run.read(name)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    for number, record in enumerate(records, 1):
        for key, (what, holds) in CHECKS[name].items():
            if (key in record or key in needed) and not holds(record.get(key)):
                raise ValueError(f"{path}: {key} of record {number} is not {what}; the file was damaged")
    if len({len(record["slot_accuracy"]) for record in records if record.get("slot_accuracy")}) > 1:
        raise ValueError(f"{path}: slot_accuracy differs in length from record to record; the file was damaged")
    return records
