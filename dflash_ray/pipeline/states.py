"""The states of a position in the flow, what the flow knows of each target, and the window that bounds features in flight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

PLANNED, READY, HANDED, COMPUTING = "planned", "ready", "handed", "computing"
FEATURES, STAGED, DONE, QUARANTINED = "features", "staged", "done", "quarantined"


@dataclass
class TargetState:
    queue: deque[int] = field(default_factory=deque)  # handed, not started
    computing: int | None = None
    draining: bool = False
    parked: bool = False
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=5))  # seconds per token of the last batches
    speed: float | None = None  # their median, seconds per token
    batches: int = 0

    @property
    def works(self) -> bool:
        """May it be given batches?"""
        return not self.draining and not self.parked

    def took(self, seconds_per_token: float) -> None:
        self.recent.append(seconds_per_token)
        self.speed = median_low(self.recent)


class Window:
    """What computes, is computed or staged: at most `size` positions ahead, and `most_bytes` of features unless there is only one."""

    def __init__(self, size: int, most_bytes: int):
        self.size, self.most_bytes = size, most_bytes
        self.used = 0  # bytes
        self._count = 0

    def fits(self, nbytes: int) -> bool:
        return self.used + nbytes <= self.most_bytes or self._count == 0

    def enter(self, nbytes: int) -> None:
        self._count += 1
        self.used += nbytes

    def leave(self, nbytes: int) -> None:
        self._count -= 1
        self.used -= nbytes
