"""How many targets feed how many drafters: the arithmetic of a topology.

Targets make features, drafters consume them, a bounded line lies between: the run goes at the pace of the slower side,
min(targets x target rate, drafters x drafter rate), and the other side waits. Everything is real tokens per second. What a drafter needs
per token depends on how many anchors it trains: context seconds + anchor seconds / tokens per anchor + its share of the optimizer step.

Left out, so a measured run may be slower: start-up, validation, checkpoints, batches of uneven length in a short window, and what GPUs of
one host take from each other. More than one drafter is arithmetic only: what they would have to exchange costs nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

NEARLY = 0.99  # of the most that is possible counts as all of it
BALANCED = 0.02  # waiting less than this share is no waiting
WAITING_SHARE = 0.2  # of the watts of a GPU that works: assumed for one that waits with a model in its memory


@dataclass(frozen=True)
class DrafterCost:
    """Seconds of one drafter: per context token, per anchor, and of the optimizer step per token."""

    context: float
    anchor: float
    optimizer: float = 0.0

    def seconds_per_token(self, tokens_per_anchor: float) -> float:
        return self.context + self.anchor / tokens_per_anchor + self.optimizer

    def balancing_tokens_per_anchor(self, wanted: float) -> float | None:
        """Tokens per anchor at which one drafter takes `wanted` tokens/s; None if it could not even without anchors."""
        room = 1.0 / wanted - self.context - self.optimizer
        return self.anchor / room if room > 0 else None


@dataclass(frozen=True)
class Power:
    """Watts of a GPU that works and of one that waits, and of everything else in the host."""

    target: float
    drafter: float
    waiting: float
    host: float = 0.0


@dataclass(frozen=True)
class Rates:
    """Tokens/s of one target and of one drafter at the run's anchors; how the drafter's time splits and what it draws, where known."""

    target: float
    drafter: float
    cost: DrafterCost | None = None
    power: Power | None = None


@dataclass(frozen=True)
class Point:
    """One topology. Waits are shares of each actor's time; days, gpu_hours, watts and tokens_per_joule are None where unknown."""

    targets: int
    drafters: int
    tokens_per_second: float
    target_wait: float
    drafter_wait: float
    watts: float | None
    tokens_per_joule: float | None
    days: float | None
    gpu_hours: float | None

    @property
    def gpus(self) -> int:
        return self.targets + self.drafters

    @property
    def waits(self) -> str:
        if self.target_wait > BALANCED:
            return f"targets {100 * self.target_wait:.0f}%"
        if self.drafter_wait > BALANCED:
            return f"drafter {100 * self.drafter_wait:.0f}%"
        return "nobody"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def point(rates: Rates, targets: int, drafters: int, tokens: float | None = None) -> Point:
    """The topology of so many targets and drafters, training `tokens` real tokens in all."""
    made, taken = targets * rates.target, drafters * rates.drafter
    rate = min(made, taken)
    target_wait, drafter_wait = 1 - rate / made, 1 - rate / taken
    watts = None
    if rates.power is not None:
        power = rates.power
        watts = (
            power.host
            + targets * (power.waiting + (power.target - power.waiting) * (1 - target_wait))
            + drafters * (power.waiting + (power.drafter - power.waiting) * (1 - drafter_wait))
        )
    seconds = tokens / rate if tokens else None
    return Point(
        targets=targets,
        drafters=drafters,
        tokens_per_second=rate,
        target_wait=target_wait,
        drafter_wait=drafter_wait,
        watts=watts,
        tokens_per_joule=rate / watts if watts else None,
        days=seconds / 86400 if seconds else None,
        gpu_hours=seconds / 3600 * (targets + drafters) if seconds else None,
    )


def recommend(points: Iterable[Point], gpus: int | None = None) -> Point | None:
    """The fewest GPUs that reach nearly the most tokens/s that `gpus` GPUs (default any number) can; None if nothing fits them."""
    fitting = [one for one in points if gpus is None or one.gpus <= gpus]
    if not fitting:
        return None
    most = max(one.tokens_per_second for one in fitting)
    return min((one for one in fitting if one.tokens_per_second >= NEARLY * most), key=lambda one: (one.gpus, -one.tokens_per_second))


def rates_behind(measured: dict[int, float]) -> tuple[Rates, str]:
    """Rates that explain whole runs with one drafter, tokens/s by number of targets, and a sentence on what is certain.

    A run shows the slower side only. Where more targets gave no more, the drafter is that side, and its rate is the best run's; of the
    targets no more is known than that the fewest which gave it sufficed. Where the best run is the one with most targets, the targets may
    still be the slower side, and both rates are the least possible.
    """
    best = max(measured.values())
    fewest = min(targets for targets, rate in measured.items() if rate >= NEARLY * best)
    most = max(measured)
    rates = Rates(target=max(rate / targets for targets, rate in measured.items()), drafter=best)
    if fewest < most:
        return rates, (
            f"{most} targets gave no more than {fewest}, so the drafter takes {best:,.0f} tokens/s; "
            f"a target makes at least {rates.target:,.0f}"
        )
    return rates, (
        f"the most targets ({most}) were the fastest, so a target makes at least {rates.target:,.0f} tokens/s and the drafter takes at "
        f"least {best:,.0f}: a run with more targets would tell which of them decides"
    )
