"""Which targets are slow, and which batch a slow one may take without holding up the others.

In order means throughput <= window / (time of the slowest target's batch). So a target slower than a factor times the median gets only
positions so far ahead that the drafter does not reach them before it is done.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from statistics import median_low

from dflash_ray.pipeline.states import TargetState


def slow_targets(targets: Mapping[str, TargetState], factor: float) -> set[str]:
    """Names of those slower than `factor` times the median of all that are not parked."""
    speeds = {name: target.speed for name, target in targets.items() if target.speed is not None and not target.parked}
    limit = factor * median_low(speeds.values()) if speeds else 0.0
    return {name for name, speed in speeds.items() if speed > limit}


def position_for_slow(
    waiting: Iterable[int],
    tokens: Mapping[int, int],
    next_position: int,
    targets: Mapping[str, TargetState],
    slow: Collection[str],
    name: str,
    drafter_seconds: float | None,
) -> int | None:
    """The lowest of the `waiting` positions that the drafter will not reach before the slow target `name` has computed it.

    tokens: of each position; `next_position` is what the drafter consumes next, `drafter_seconds` what a batch takes it, if known.
    """
    rates = [1 / one.speed for other, one in targets.items() if one.speed and not one.parked and other not in slow]
    fast_batch = 1 / sum(rates)  # seconds per token of all fast targets together
    own = targets[name].speed
    best = None
    for position in waiting:
        if best is None or position < best:
            per_batch = max(fast_batch * tokens[position], drafter_seconds or 0.0)
            if (position - next_position) * per_batch >= own * tokens[position]:
                best = position
    return best
