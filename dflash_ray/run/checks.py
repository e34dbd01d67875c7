"""What a run's plan and checkpoint must agree with before anything is started; ValueError says what the user must change."""

from __future__ import annotations

from typing import Any

from dflash_ray.draft.trainer import check_same_training
from dflash_ray.run.checkpoint import Checkpoint
from dflash_ray.run.spec import RunSpec

STORE_SHARE = 0.7  # of the object store may be features in flight


def check_identity(spec: RunSpec, checkpoint: Checkpoint, mine: dict[str, Any], total_steps: int) -> None:
    """A checkpoint continues only the run it was made by: the same data, plan, seed and drafter."""
    if "trainer" not in checkpoint.meta:
        raise ValueError(f"checkpoint {checkpoint.path}: meta.json has no trainer; it was not written by this trainer")
    check_same_training(checkpoint.meta["trainer"], spec.shape, spec.config.optimizer.name, total_steps)
    keys = {
        "plan": "data, batching, anchors, train.epochs",
        "dataset": "data.path",
        "batches_per_step": "train.batches_per_step",
        "weights": "weights in target.path",
    }
    for name, value in checkpoint.meta.items():
        if name in mine and mine[name] != value:
            raise ValueError(
                f"--resume: the checkpoint's {name} is {value}, this run's is {mine[name]}; "
                f"continue with the same {keys.get(name, 'run.' + name)}, or start over with --fresh"
            )


def window_bytes(spec: RunSpec, store_bytes: int, plan: dict[str, Any]) -> int:
    """What may be in flight; ValueError, with the arithmetic, where not even one batch fits the object store."""
    tokens, anchors = plan["most_tokens"], plan["most_anchors"]
    largest = spec.message_bytes(tokens, anchors)
    room = int(STORE_SHARE * store_bytes)
    wanted = spec.config.flow.window_bytes or room
    if largest > room:
        raise ValueError(
            f"batching.token_budget: the largest batch has {tokens:,} tokens x {spec.shape.features:,} features "
            f"x {spec.feature_bytes} B = {largest / 1e6:,.0f} MB, more than {STORE_SHARE:g} of the object store "
            f"({store_bytes / 1e6:,.0f} MB); lower the budget or enlarge the store (/dev/shm)"
        )
    if wanted > room:
        raise ValueError(
            f"flow.window_bytes: {wanted / 1e6:,.0f} MB is more than {STORE_SHARE:g} of the object store "
            f"({store_bytes / 1e6:,.0f} MB = {room / 1e6:,.0f} MB usable); lower it or enlarge the store (/dev/shm)"
        )
    window = spec.config.flow.window
    if window is not None and window * largest > wanted:
        raise ValueError(
            f"flow.window: {window:,} batches x {largest / 1e6:,.1f} MB ({tokens:,} tokens x {spec.shape.features:,} features "
            f"x {spec.feature_bytes} B) = {window * largest / 1e6:,.0f} MB, and {wanted / 1e6:,.0f} MB may be in flight; "
            "lower it, or enlarge the store (/dev/shm) or flow.window_bytes"
        )
    return wanted
