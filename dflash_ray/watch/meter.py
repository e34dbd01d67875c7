"""The numbers a run keeps of itself while it trains: sums of a step, rates over time, smoothed losses, spikes.

Real tokens and padded (allocated) tokens are different numbers and both are kept. Rates are tokens over a sliding window of time, the
first steps (warm-up of kernels and caches) left out; the time that is left follows from the tokens that are left, not from batches.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from dflash_ray.data.batches.batch import BatchInfo
from dflash_ray.run.metric_records import StepRecord

WARMUP_STEPS = 2
SPIKE_FACTOR = 2.0  # a loss this many times the rolling median is reported


@dataclass
class StepTally:
    """Adds up the batches of one step."""

    real_tokens: int = 0
    padded_tokens: int = 0
    documents: int = 0
    supervised: int = 0
    sample_ids: list[int] = field(default_factory=list)
    buckets: set[int] = field(default_factory=set)

    def add(self, batch: BatchInfo) -> None:
        self.real_tokens += batch.tokens
        self.padded_tokens += batch.allocated_tokens
        self.documents += batch.documents
        self.supervised += batch.supervised
        self.sample_ids += batch.sample_ids
        if batch.bucket >= 0:
            self.buckets.add(batch.bucket)


class Meter:
    """Clock readings and token counts in, rates and shares out. The clock is the caller's, in seconds."""

    def __init__(self, total_tokens: int, window_seconds: float = 120.0):
        self.total_tokens, self.window_seconds = total_tokens, window_seconds
        self._history: deque[tuple[float, ...]] = deque()  # time, and sums: real, padded, drafter wait, target wait, joules
        self.done_tokens = 0
        self._steps = 0
        self._real = self._padded = 0
        self._drafter_wait = self._target_wait = 0.0
        self._joules = 0.0
        self._watts: tuple[float, float] | None = None  # clock and sum over all devices of the last reading; None: nobody measures
        self._losses: deque[tuple[float, float]] = deque(maxlen=51)  # loss, mean document length
        self._smooth_loss = self._smooth_weight = 0.0

    def start(self, now: float) -> None:
        """Counting begins, also again after a pause that must not count."""
        self._history.clear()
        self._history.append(self._sums(now))

    def _sums(self, now: float) -> tuple[float, ...]:
        return (now, self._real, self._padded, self._drafter_wait, self._target_wait, self.joules(now))

    def skip(self, tokens: int) -> None:
        """`tokens` of the total were trained before this process began."""
        self.done_tokens = tokens

    @property
    def padding_efficiency(self) -> float:
        """Real tokens / allocated tokens since the start."""
        return self._real / self._padded if self._padded else 1.0

    def drafter_waited(self, seconds: float) -> None:
        self._drafter_wait += seconds

    def target_waited(self, seconds: float, targets: int) -> None:
        """`seconds` of one of `targets` targets without a batch because of credit."""
        self._target_wait += seconds / max(targets, 1)

    def power(self, now: float, watts: float) -> None:
        """All devices together take `watts` from now on."""
        self._joules = self.joules(now)
        self._watts = (now, watts)

    def joules(self, now: float) -> float:
        """Since the first reading."""
        return self._joules + (self._watts[1] * (now - self._watts[0]) if self._watts else 0.0)

    def tokens_per_joule(self, now: float) -> float | None:
        """Real tokens trained by this process per joule; None where power is not measured."""
        return self._real / joules if (joules := self.joules(now)) else None

    def step(self, now: float, real: int, padded: int) -> dict[str, float | None]:
        """One step ended. Returns rates over the window: real_tokens_per_second, padded_tokens_per_second, drafter_wait, target_wait,
        watts and tokens_per_joule (both None where power is not measured)."""
        self._steps += 1
        self._real += real
        self.done_tokens += real
        self._padded += padded
        if self._steps == WARMUP_STEPS:
            self.start(now)
        self._history.append(self._sums(now))
        while len(self._history) > 2 and now - self._history[1][0] > self.window_seconds:
            self._history.popleft()
        first = self._history[0]
        seconds = max(now - first[0], 1e-9)
        if len(self._history) < 2 or now == first[0]:
            rates = ("real_tokens_per_second", "padded_tokens_per_second", "drafter_wait", "target_wait")
            return dict.fromkeys(rates, 0.0) | {"watts": None, "tokens_per_joule": None}
        joules = self._history[-1][5] - first[5]
        return {
            "real_tokens_per_second": (self._real - first[1]) / seconds,
            "padded_tokens_per_second": (self._padded - first[2]) / seconds,
            "drafter_wait": min((self._drafter_wait - first[3]) / seconds, 1.0),
            "target_wait": min((self._target_wait - first[4]) / seconds, 1.0),
            "watts": joules / seconds if joules else None,
            "tokens_per_joule": (self._real - first[1]) / joules if joules else None,
        }

    def smooth(self, loss: float, supervised: int) -> float:
        """Loss averaged with weight by supervised tokens; what lies ten steps of the same size back counts about a third. A loss
        that is no finite number, as of a step that was skipped, counts nothing; else no later value would be finite."""
        if not math.isfinite(loss):
            loss, supervised = 0.0, 0
        self._smooth_loss = 0.9 * self._smooth_loss + loss * supervised
        self._smooth_weight = 0.9 * self._smooth_weight + supervised
        return self._smooth_loss / self._smooth_weight if self._smooth_weight else loss

    def remember(self, records: list[StepRecord]) -> None:
        """Losses go on as if these lines of metrics.jsonl, and no others, had just been counted."""
        self._losses.clear()
        self._smooth_loss = self._smooth_weight = 0.0
        for record in records:
            self.smooth(record.loss, record.supervised_tokens or 0)
            if not record.skipped:
                self._losses.append((record.loss, record.mean_document_tokens))

    def spike(self, loss: float, document_tokens: float) -> dict[str, float] | None:
        """How many times the rolling median this loss is, if that is too many, and the median mean document length beside it: a jump
        that comes from other lengths is to be seen as such."""
        middle = median(one for one, _ in self._losses) if len(self._losses) >= 10 else None
        usual = median(length for _, length in self._losses) if self._losses else document_tokens
        self._losses.append((loss, document_tokens))
        return {"factor": loss / middle, "usual_tokens": usual} if middle and loss > SPIKE_FACTOR * middle else None

    def eta_seconds(self, tokens_left: int, rate: float) -> float | None:
        return tokens_left / rate if rate > 0 else None
