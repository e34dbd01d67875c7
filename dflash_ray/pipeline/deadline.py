"""How long an answer may take before its sender counts as hung, learned from how long earlier ones took.

Nobody can tell a hung process from a slow one; what can be told is that it takes `factor` times as long as the median of its like.
Being wrong costs a restart and no sample, so the limit is short: never under `least` seconds, and `first` until three are measured.
"""

from __future__ import annotations

from collections import deque
from statistics import median


class Deadline:
    """Seconds are the caller's. `size` is what the time grows with, tokens for instance."""

    def __init__(self, first: float, least: float, factor: float):
        self.first, self.least, self.factor = first, least, factor
        self._measured: deque[float] = deque(maxlen=64)

    def took(self, seconds: float, size: int = 1) -> None:
        self._measured.append(seconds / max(size, 1))

    def limit(self, size: int = 1) -> float:
        if len(self._measured) < 3:
            return self.first
        return max(self.least, self.factor * median(self._measured) * max(size, 1))
