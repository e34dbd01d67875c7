"""Batches that nobody can compute: counted, computed again, and in the end quarantined with their sample ids.

A quarantined batch counts as empty in its step. Many in a row are no bad batches but a bad setup, and end the run.
"""

from __future__ import annotations

from actors.answers import RunFailed
from actors.coordinator.run_state import RunState
from dflash_ray.run.metric_records import QuarantinedBatch, read_events


def count_failure(run: RunState, position: int, reason: str) -> None:
    """One more attempt at `position`, which is waiting or planned again, came to nothing."""
    config = run.spec.config.flow
    run.failures[position] = run.failures.get(position, 0) + 1
    if run.failures[position] < config.deaths_per_batch:
        return
    item = run.item(position)
    info, _ = run.batches.pop(position)
    run.flow.quarantine(position)
    if item.kind == "train":
        run.quarantined[item.number] = QuarantinedBatch(batch=item.number, sample_ids=info.sample_ids, reason=reason)
    run.event(
        "set_aside",
        f"{item.kind} batch {item.number} failed {run.failures.pop(position)} times, last on {reason}; it counts as empty",
        batch=item.number,
        line=item.kind,
        sample_ids=info.sample_ids,
    )
    first = last = item.number
    while first - 1 in run.quarantined:
        first -= 1
    while last + 1 in run.quarantined:
        last += 1
    if item.kind == "train" and last - first + 1 >= config.max_set_aside_in_a_row:
        run.fail(RunFailed(f"batches {first} to {last} could not be computed, {last - first + 1} in a row; the last: {reason}"))


def earlier_quarantined(run: RunState) -> dict[int, QuarantinedBatch]:
    """What the folder's events say was quarantined, also after the checkpoint that the run continues from."""
    found = [event for event in read_events(run.folder) if event.event == "set_aside" and event.details.get("line") == "train"]
    return {
        event.details["batch"]: QuarantinedBatch(batch=event.details["batch"], sample_ids=event.details["sample_ids"], reason=event.reason)
        for event in found
    }
