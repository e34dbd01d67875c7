"""What the console shows: the line of a step, and advice where one side waits for the other."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_ray.run.metric_records import StepRecord


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


def console_line(record: StepRecord, total_steps: int) -> str:
    """One line of a step's record, for instance
    `step 58/89,950 | loss 1.52 acc .21 tau 2.31 | lr 1.2e-05 noise .010 | 25.2 Ktok/s real 29.0 padded (eff 86.8%) | ...`"""
    efficiency = record.real_tokens / record.padded_tokens if record.padded_tokens else 1.0
    parts = [
        f"step {record.step:,}/{total_steps:,}",
        f"loss {record.loss:.3f} smooth {record.loss_smooth:.3f} acc {_short(record.accuracy, 2)} tau {record.tau:.2f}",
        f"lr {record.lr:.1e} noise {_short(record.noise_std, 3)}",
        f"{thousands(record.real_tokens_per_second)} Ktok/s real {thousands(record.padded_tokens_per_second)} padded "
        f"(eff {100 * efficiency:.1f}%)",
        f"len {record.mean_document_tokens:.0f}{_bucket(record.buckets)}",
        f"q_pre={_list(record.q_pre)} ahead={record.ahead} q_hs=[{record.q_hs}] "
        f"wait: drafter {100 * record.drafter_wait:.0f}% targets {100 * record.target_wait:.0f}%",
    ]
    if record.watts is not None:
        parked = f" {record.parked} parked" if record.parked else ""
        parts.append(f"{record.watts / 1000:.2f} kW {record.tokens_per_joule:.1f} tok/J{parked}")
    if record.spike is not None:
        parts.append(f"SPIKE {record.spike:.1f} x the rolling median")
    parts.append(f"ETA {duration(record.eta_seconds)}")
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
