"""What the run says about itself: one record per optimizer step, and the console line made from it.

Real tokens and padded (allocated) tokens are different numbers and both are kept. Rates are tokens over a sliding window of time, the
first steps (warm-up of kernels and caches) left out; the time that is left follows from the tokens that are left, not from batches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

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

    def add(self, meta: dict[str, Any]) -> None:
        self.real_tokens += meta["tokens"]
        self.padded_tokens += meta["allocated_tokens"]
        self.documents += meta["documents"]
        self.supervised += meta["supervised"]
        self.sample_ids += meta["sample_ids"]
        if meta["bucket"] >= 0:
            self.buckets.add(meta["bucket"])


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

    def remember(self, records: list[dict[str, Any]]) -> None:
        """Losses go on as if these lines of metrics.jsonl, and no others, had just been counted."""
        self._losses.clear()
        self._smooth_loss = self._smooth_weight = 0.0
        for record in records:
            self.smooth(record["loss"], record.get("supervised_tokens", 0))
            if not record.get("skipped"):
                self._losses.append((record["loss"], record["mean_document_tokens"]))

    def spike(self, loss: float, document_tokens: float) -> dict[str, float] | None:
        """How many times the rolling median this loss is, if that is too many, and the median mean document length beside it: a jump
        that comes from other lengths is to be seen as such."""
        middle = median(one for one, _ in self._losses) if len(self._losses) >= 10 else None
        usual = median(length for _, length in self._losses) if self._losses else document_tokens
        self._losses.append((loss, document_tokens))
        return {"factor": loss / middle, "usual_tokens": usual} if middle and loss > SPIKE_FACTOR * middle else None

    def eta_seconds(self, tokens_left: int, rate: float) -> float | None:
        return tokens_left / rate if rate > 0 else None


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.1f}{unit}"
    return f"{seconds:.0f}s"


def thousands(rate: float) -> str:
    return f"{rate / 1000:.1f}"


def _short(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}"
    return text.removeprefix("0") if 0 <= value < 1 else text


def console_line(record: dict[str, Any], total_steps: int) -> str:
    """One line of a step's record, for instance
    `step 58/89,950 | loss 1.52 acc .21 tau 2.31 | lr 1.2e-05 noise .010 | 25.2 Ktok/s real 29.0 padded (eff 86.8%) | ...`"""
    efficiency = record["real_tokens"] / record["padded_tokens"] if record["padded_tokens"] else 1.0
    parts = [
        f"step {record['step']:,}/{total_steps:,}",
        f"loss {record['loss']:.3f} smooth {record['loss_smooth']:.3f} acc {_short(record['accuracy'], 2)} tau {record['tau']:.2f}",
        f"lr {record['lr']:.1e} noise {_short(record['noise_std'], 3)}",
        f"{thousands(record['real_tokens_per_second'])} Ktok/s real {thousands(record['padded_tokens_per_second'])} padded "
        f"(eff {100 * efficiency:.1f}%)",
        f"len {record['mean_document_tokens']:.0f}{_bucket(record['buckets'])}",
        f"q_pre={_list(record['q_pre'])} ahead={record['ahead']} q_hs=[{record['q_hs']}] "
        f"wait: drafter {100 * record['drafter_wait']:.0f}% targets {100 * record['target_wait']:.0f}%",
    ]
    if record["watts"] is not None:
        parked = f" {record['parked']} parked" if record["parked"] else ""
        parts.append(f"{record['watts'] / 1000:.2f} kW {record['tokens_per_joule']:.1f} tok/J{parked}")
    if record["spike"] is not None:
        parts.append(f"SPIKE {record['spike']:.1f} x the rolling median")
    parts.append(f"ETA {duration(record['eta_seconds'])}")
    return " | ".join(parts)


def _bucket(buckets: Sequence[int]) -> str:
    return f" bucket {','.join(map(str, buckets))}" if buckets else ""


def _list(values: Sequence[int]) -> str:
    return "[" + " ".join(map(str, values)) + "]"


def balance_advice(drafter_wait: float, target_wait: float, targets: int, parked: int = 0) -> str | None:
    """A plain sentence with its arithmetic when one side waits for the other more than a tenth of the time. `targets` are at work,
    `parked` more would be if power allowed."""
    if drafter_wait > 0.10 and parked:
        return (
            f"targets are the bottleneck: drafter idle {100 * drafter_wait:.0f}%, and {_plural(parked, 'parked')} must wait for "
            "power.budget_watts"
        )
    if drafter_wait > 0.10 and drafter_wait >= target_wait:
        wanted = targets / (1 - min(drafter_wait, 0.9))
        more = max(1, round(wanted - targets))
        return (
            f"targets are the bottleneck: drafter idle {100 * drafter_wait:.0f}%; {_plural(more, 'more')} would balance "
            f"({targets} / (1 - {drafter_wait:.2f}) = {wanted:.1f})"
        )
    if target_wait > 0.10 and targets > 1:
        wanted = targets * (1 - target_wait)
        fewer = targets - max(1, round(wanted))
        if fewer < 1:
            return None
        return (
            f"the drafter is the bottleneck: targets idle {100 * target_wait:.0f}%; {_plural(fewer, 'fewer')} would do "
            f"({targets} x (1 - {target_wait:.2f}) = {wanted:.1f})"
        )
    return None


def _plural(count: int, word: str) -> str:
    return f"{count} {word} target" + ("s" if count > 1 else "")
