"""When a dead actor comes back: at once the first time, then later and later, and not at all past a budget per hour."""

from __future__ import annotations

from collections import deque

LONGEST_WAIT = 60.0


class RestartBudget:
    def __init__(self, per_hour: int):
        self.per_hour = per_hour
        self.total = 0
        self._times: deque[float] = deque()

    def next_delay(self, now: float) -> float | None:
        """Seconds to wait before the restart that is asked for at `now`; None when the hour's budget is spent."""
        while self._times and now - self._times[0] > 3600:
            self._times.popleft()
        if len(self._times) >= self.per_hour:
            return None
        recent = sum(1 for time in self._times if now - time < 300)
        self._times.append(now)
        self.total += 1
        return 0.0 if recent == 0 else min(0.5 * 2.0 ** (recent - 1), LONGEST_WAIT)
