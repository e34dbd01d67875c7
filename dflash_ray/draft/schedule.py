"""Learning rate and noise as pure functions of the step, so that a resumed run goes on exactly where it was."""

from __future__ import annotations

import math

from dflash_ray.config.schema import NoiseConfig, ScheduleConfig


def rate_factor(schedule: ScheduleConfig, step: int, total_steps: int) -> float:
    """Share of the peak rate in step 0, 1, ..., total_steps - 1.

    The first `round(warmup * total)` steps rise in equal parts to 1. Then cosine and linear fall from 1 towards 0, which they would reach
    in step `total_steps`; wsd stays at 1 and falls linearly over the last `round(decay * total)` steps.
    """
    warmup = round(schedule.warmup * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.name == "wsd":
        decay = min(max(1, round(schedule.decay * total_steps)), total_steps - warmup)
        return min(1.0, (total_steps - step) / decay)
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return (1 + math.cos(math.pi * done)) / 2 if schedule.name == "cosine" else 1 - done


def noise_std(noise: NoiseConfig, step: int, total_steps: int) -> float:
    """Standard deviation of feature noise in units of a tap's RMS: linear from start (step 0) to end, which it keeps from step `steps`."""
    return noise.start + (noise.end - noise.start) * min(1.0, step / (noise.steps or total_steps))
