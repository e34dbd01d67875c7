"""Watts: where they are read, what they add up to, and when a cap on them parks or wakes a target.

Nothing here changes a setting of a device; the only way to use less power is to give less work.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

from dflash_ray.json_file import read_regular_file

READINGS = 5  # a decision rests on the mean of this many, all made since the last change
MOST_PATIENCE = 600  # readings
MOST_BYTES = 2**20  # of a file of watts
MOST_WATTS = 1e9  # of a device


def read_watts(path: Path) -> dict[str, float]:
    """Device -> watts of a file: lines of `DEVICE WATTS` or `WATTS` alone, or JSON (an object, or a list). A device is a GPU's number or
    an actor's name. FileNotFoundError where there is none, ValueError where it cannot be read or says something else."""
    try:
        text = read_regular_file(path, MOST_BYTES).decode()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = _lines(text)
    if isinstance(value, int | float):
        value = [value]
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{path}: holds no watts; write one line `DEVICE WATTS` per device")
    out = {}
    for device, watts in value.items():
        if isinstance(watts, bool) or not isinstance(watts, int | float) or not 0 <= watts < MOST_WATTS:
            raise ValueError(f"{path}: {str(watts)[:40]!r} of device {str(device)[:40]} is no number of watts")
        out[str(device)] = float(watts)
    return out


def _lines(text: str) -> dict[str, float | str]:
    out: dict[str, float | str] = {}
    for line in text.splitlines():
        words = line.replace(",", " ").replace(":", " ").replace("=", " ").split()
        if words:
            device = words[0] if len(words) > 1 else str(len(out))
            try:
                out[device] = float(words[-1])
            except ValueError:
                out[device] = words[-1]
    return out


class PowerCap:
    """Says when to park a target and when to wake one, one at a time.

    It parks while the mean is above `budget` watts and wakes while it is below `wake_below` x budget; between the two nothing changes. A
    wake that led straight back above the budget doubles the time until the next one is tried.
    """

    def __init__(self, budget: float, wake_below: float):
        self.budget, self.wake_below = budget, wake_below
        self._recent: deque[float] = deque(maxlen=READINGS)
        self._since = 0  # readings since the last change
        self._patience = READINGS
        self._woke = False  # the last change was a wake that has not proved itself

    @property
    def mean(self) -> float:
        return sum(self._recent) / len(self._recent)

    def decide(self, watts: float) -> str | None:
        """`park`, `wake` or None after one more reading; tell `changed` if it was done."""
        self._recent.append(watts)
        self._since += 1
        if len(self._recent) < READINGS:
            return None
        if self._woke and self._since > 2 * self._patience:
            self._woke, self._patience = False, READINGS
        if self.mean > self.budget:
            return "park"
        if self.mean < self.wake_below * self.budget and self._since >= self._patience:
            return "wake"
        return None

    def changed(self, how: str) -> None:
        if how == "park" and self._woke:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        self._woke = how == "wake"
        self._recent.clear()
        self._since = 0
