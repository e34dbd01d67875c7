"""What must hold before anything is started: of the data, of the checkpoint that a run continues, of the object store.

ValueError says what the user must change.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dflash_ray.run.build import PlanInfo, open_data
from dflash_ray.run.spec import RunSpec

if TYPE_CHECKING:
    from dflash_ray.run.checkpoint import Checkpoint, RunIdentity

STORE_SHARE = 0.7  # of the object store may be features in flight


def check_identity(spec: RunSpec, checkpoint: Checkpoint, mine: RunIdentity, total_steps: int) -> None:
    """A checkpoint continues only the run it was made by: the same data, plan, seed and drafter."""
    from dflash_ray.draft.trainer import check_same_training

    check_same_training(checkpoint.meta.trainer, spec.shape, spec.config.optimizer.name, total_steps)
    keys = {
        "plan": "data, batching, anchors, train.epochs",
        "dataset": "data.path",
        "batches_per_step": "train.batches_per_step",
        "weights": "weights in target.path",
    }
    for name, value in asdict(mine).items():
        theirs = getattr(checkpoint.meta, name)
        if theirs is not None and value != theirs:
            raise ValueError(
                f"--resume: the checkpoint's {name} is {theirs}, this run's is {value}; "
                f"continue with the same {keys.get(name, 'run.' + name)}, or start over with --fresh"
            )


def window_bytes(spec: RunSpec, store_bytes: int, plan: PlanInfo) -> int:
    """What may be in flight; ValueError, with the arithmetic, where not even one batch fits the object store."""
    tokens, anchors = plan.most_tokens, plan.most_anchors
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


def check_data(spec: RunSpec) -> None:
    """What a glance at the dataset can tell: readable, supervised, within budget and positions, made with the target's tokenizer."""
    from dflash_ray.data.batches.plan import refuse_over_budget
    from dflash_ray.data.prepare.tokenizer import check_same_tokenizer
    from dflash_ray.data.store.dataset import dataset_splits

    config, target_shape = spec.config, spec.target_shape
    dataset = open_data(config)
    refuse_over_budget(dataset.lengths, config.batching)
    held_out = [open_data(config, "validation")] if "validation" in dataset_splits(config.data.path) else []
    longest = max(int(split.lengths.max()) for split in (dataset, *held_out))
    if longest > target_shape.max_position_embeddings:
        raise ValueError(
            f"data.path: a sample of {longest} tokens is longer than the target's {target_shape.max_position_embeddings} positions; "
            "prepare the data with a smaller --max-length"
        )
    made_with = _counted(dataset.manifest, "vocab_size")
    if made_with > target_shape.vocab_size:
        raise ValueError(
            f"data.path: {config.data.path} was made with a tokenizer of {made_with} tokens, the target has {target_shape.vocab_size}; "
            "prepare the data with the target's tokenizer"
        )
    mask = config.draft.mask_token_id
    if times := _counted(dataset.manifest, "counts", "added_tokens", str(mask)):
        raise ValueError(f"draft.mask_token_id: {mask} occurs {times:,} times in {config.data.path}; use an id that never occurs in text")
    if config.target.path is not None:
        check_same_tokenizer(dataset.manifest, config.target.path)


def _counted(manifest: dict[str, Any], *keys: str) -> int:
    """A number of the manifest, 0 where it says nothing."""
    value: Any = manifest
    for key in keys:
        value = value.get(key, 0) if isinstance(value, dict) else 0
    return value if type(value) is int else 0
