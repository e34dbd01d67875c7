"""Batches that nobody can compute: counted, computed again, and in the end set aside with their sample ids.

A batch set aside counts as empty in its step. Many in a row are no bad batches but a bad setup, and end the run.
"""

from __future__ import annotations

from actors.answers import RunFailed
from actors.coordinator.run_state import RunState


def count_failure(run: RunState, position: int, reason: str) -> None:
    """One more attempt at `position`, which is waiting or planned again, came to nothing."""
    config = run.spec.config.flow
    run.failures[position] = run.failures.get(position, 0) + 1
    if run.failures[position] < config.deaths_per_batch:
        return
    item = run.item(position)
    facts, _ = run.batches.pop(position)
    run.flow.set_aside(position)
    if item.kind == "train":
        run.aside[item.number] = {"batch": item.number, "sample_ids": facts["sample_ids"], "reason": reason}
    run.event(
        "set_aside",
        f"{item.kind} batch {item.number} failed {run.failures.pop(position)} times, last on {reason}; it counts as empty",
        batch=item.number,
        line=item.kind,
        sample_ids=facts["sample_ids"],
    )
    first = last = item.number
    while first - 1 in run.aside:
        first -= 1
    while last + 1 in run.aside:
        last += 1
    if item.kind == "train" and last - first + 1 >= config.max_set_aside_in_a_row:
        run.fail(RunFailed(f"batches {first} to {last} could not be computed, {last - first + 1} in a row; the last: {reason}"))


def earlier_set_aside(run: RunState) -> dict[int, dict]:
    """What the folder's events say was set aside, also after the checkpoint that the run continues from."""
    found = [event for event in run.folder.read("events.jsonl") if event.get("event") == "set_aside" and event.get("line") == "train"]
    return {event["batch"]: {key: event[key] for key in ("batch", "sample_ids", "reason")} for event in found}
