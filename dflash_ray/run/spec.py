"""From a config to everything a run is made of, resolved once and checked before anything is written.

`resolve` raises ValueError, one line, for whatever the user could have got wrong. Its result travels to the actors, which build their
library objects from it here; so the driver, the actors and `--dry-run` cannot disagree about a default.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_ray.config.schema import Config, merge, validate

if TYPE_CHECKING:
    from dflash_ray.data.batches.batch import Batch
    from dflash_ray.data.batches.source import BatchSource
    from dflash_ray.data.store.dataset import Dataset
    from dflash_ray.draft.dflash.shape import DraftShape
    from dflash_ray.draft.trainer import DraftTrainer
    from dflash_ray.target.model import FrozenTarget
    from dflash_ray.target.shape import TargetFacts


@dataclass(frozen=True)
class RunSpec:
    config: Config
    device: str  # cpu | cuda
    facts: TargetFacts
    shape: DraftShape
    strategy: str  # packed | bucketed | random | sorted
    strategy_reason: str
    run_dir: Path
    namespace: str  # of the actors' names
    weights: str = ""  # fingerprint of the target's; empty where they are random or nobody looked

    @property
    def feature_bytes(self) -> int:
        """Bytes of one feature value as it travels: bf16 from a GPU target, float32 from a CPU target unless told otherwise."""
        precision = self.config.target.precision
        if precision == "auto":
            return 4 if self.device == "cpu" else 2
        return 4 if precision == "float32" else 2

    def message_bytes(self, tokens: int, anchors: int) -> int:
        """Most bytes that one batch's features (and teacher rows with their int32 positions) take in the object store."""
        rows = self.teacher_rows(tokens, anchors)
        return (tokens * self.shape.features + rows * self.shape.hidden) * self.feature_bytes + 4 * rows

    def teacher_rows(self, tokens: int, anchors: int) -> int:
        """Most teacher rows of one batch: K-1 of each block, but every position once."""
        return min(tokens, anchors * (self.shape.block_size - 1)) if self.config.loss.needs_teacher else 0

    @property
    def window(self) -> int:
        return self.config.flow.window or 2 * self.config.targets + 2


def resolve(config: Config, *, device: str, run_dir: Path, namespace: str = "dflash-ray") -> RunSpec:
    """Target, drafter shape and batching of a run. Reads the target's config and tokenizer, no weights and no samples."""
    from dflash_ray.data.batches.plan import resolve_strategy
    from dflash_ray.draft.dflash.shape import resolve_shape
    from dflash_ray.target.shape import resolve_mask_token, shape_facts, target_facts

    target = config.target
    if target.shape is not None and (target.weights == "random" or target.path is None):
        facts = shape_facts(target.shape)
        if config.draft.mask_token_id is None:
            raise ValueError("draft.mask_token_id: a target given by target.shape has no tokenizer to ask; set the id")
        mask = config.draft.mask_token_id
    elif target.path is None:
        raise ValueError("target.path: not set; give the folder of the frozen target (or target.shape with --dry-run)")
    else:
        facts = target_facts(target.path)
        mask = resolve_mask_token(target.path, config.draft.mask_token_id)
    config = validate(merge(config.as_dict(), {"draft": {"mask_token_id": mask}}))
    shape = resolve_shape(config.draft, facts)
    config = validate(merge(config.as_dict(), {"draft": {"target_layer_ids": list(shape.target_layer_ids)}}))
    if config.draft.init != "random":
        from dflash_ray.draft.dflash.export import check_warm_start

        if not Path(config.draft.init).is_dir():
            raise ValueError(f"draft.init: {config.draft.init} is no folder; give `random` or the folder of an exported drafter")
        check_warm_start(Path(config.draft.init), shape)
    strategy, reason = resolve_strategy(config.batching, facts.isolates_documents(device))
    return RunSpec(config, device, facts, shape, strategy, reason, Path(run_dir), namespace)


def with_weights(spec: RunSpec) -> RunSpec:
    """With the fingerprint of the target's weights. ValueError for a target folder without whole weights."""
    return replace(spec, weights=_weights(spec.config))


def _weights(config: Config) -> str:
    from dflash_ray.target.weights import Checkpoint

    return "" if config.target.weights == "random" else Checkpoint(config.target.path).fingerprint()


@contextmanager
def _same_weights(spec: RunSpec) -> Iterator[None]:
    """Read inside what belongs to the target. ValueError where its folder holds other weights on this node than where the run was started,
    or by now: before anything is read, and once more afterwards, because reading takes its time."""
    _refuse_other_weights(spec)
    yield
    _refuse_other_weights(spec)


def _refuse_other_weights(spec: RunSpec) -> None:
    if spec.weights and _weights(spec.config) != spec.weights:
        raise ValueError(
            f"target.path: {spec.config.target.path} on {socket.gethostname()} does not hold the weights that this run began with; "
            "every node needs the same folder, and it must stay as it is while a run lasts"
        )


def load_run_target(spec: RunSpec) -> FrozenTarget:
    from dflash_ray.target.load import load_target

    target = spec.config.target
    with _same_weights(spec):
        return load_target(
            target.path,
            taps=list(spec.shape.target_layer_ids),
            device=spec.device,
            precision=target.precision,
            layout=target.layout,
            teacher=spec.config.loss.needs_teacher,
            random_shape=target.shape if target.weights == "random" else None,
            seed=spec.config.run.seed,
            require_fast=target.require_fast_path and spec.device == "cuda",
        )


def make_trainer(spec: RunSpec, total_steps: int) -> DraftTrainer:
    from dflash_ray.draft.trainer import DraftTrainer
    from dflash_ray.target.weights import embedding_and_head, random_embedding

    if spec.config.target.weights == "random":
        embed = head = random_embedding(spec.facts, spec.config.run.seed, spec.device)
        tables = f"random {spec.device} {spec.config.run.seed}"
    else:
        with _same_weights(spec):
            embed, head, tables = embedding_and_head(spec.config.target.path)
    return DraftTrainer(spec.config, spec.shape, embed, head, spec.device, total_steps, tables=tables)


class RunBatches:
    """Both lines of batches of a run, training and validation."""

    def __init__(self, train: BatchSource, validation: list[Batch], facts: dict[str, Any], mask_token: int):
        self._train, self._validation, self._facts, self._mask_token = train, validation, facts, mask_token

    def describe(self) -> dict[str, Any]:
        return self._facts

    def batch(self, kind: str, number: int) -> Batch:
        """ValueError if the mask token occurs in it: the drafter would be fed its own empty slot as text."""
        batch = self._train.batch(number) if kind == "train" else self._validation[number]
        if (batch.input_ids == self._mask_token).any():
            raise ValueError(f"draft.mask_token_id: {self._mask_token} occurs in the data; use an id that never occurs in text")
        return batch


def open_data(config: Config, split: str = "train") -> Dataset:
    from dflash_ray.data.store.dataset import open_dataset

    if config.data.path is None:
        raise ValueError("data.path: not set; give a dataset folder made by jobs.prepare_data")
    return open_dataset(config.data.path, split, config.data.columns)


def check_data(spec: RunSpec) -> None:
    """What a glance at the dataset can tell: readable, supervised, within budget and positions, made with the target's tokenizer."""
    from dflash_ray.data.batches.plan import refuse_over_budget
    from dflash_ray.data.prepare.tokenizer import check_same_tokenizer
    from dflash_ray.data.store.dataset import dataset_splits

    config, facts = spec.config, spec.facts
    dataset = open_data(config)
    refuse_over_budget(dataset.lengths, config.batching)
    held_out = [open_data(config, "validation")] if "validation" in dataset_splits(config.data.path) else []
    longest = max(int(split.lengths.max()) for split in (dataset, *held_out))
    if longest > facts.max_position_embeddings:
        raise ValueError(
            f"data.path: a sample of {longest} tokens is longer than the target's {facts.max_position_embeddings} positions; "
            "prepare the data with a smaller --max-length"
        )
    made_with = _counted(dataset.manifest, "vocab_size")
    if made_with > facts.vocab_size:
        raise ValueError(
            f"data.path: {config.data.path} was made with a tokenizer of {made_with} tokens, the target has {facts.vocab_size}; "
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


def open_batches(spec: RunSpec) -> RunBatches:
    """The plan of all epochs and the samples behind it. ValueError for a dataset that cannot be trained on."""
    from dflash_ray.data.batches.source import BatchSource, plan_run, validation_batches
    from dflash_ray.data.store.dataset import dataset_splits

    config = spec.config
    batching = config.batching.model_copy(update={"strategy": spec.strategy})
    per_anchor, seed = config.anchors.tokens_per_anchor, config.run.seed
    dataset = open_data(config)
    plan = plan_run(dataset, batching, per_anchor, seed, config.train.epochs)
    held_out: list[Batch] = []
    if config.validation.batches and "validation" in dataset_splits(config.data.path):
        layout = "packed" if spec.strategy == "packed" else "padded"
        every, most = config.validation.tokens_per_anchor or per_anchor, config.validation.batches
        held_out = validation_batches(open_data(config, "validation"), batching, every, seed, most, layout)
    facts = {
        "samples": len(dataset),
        "tokens": plan.tokens,
        "batches": plan.total_batches,
        "validation_batches": len(held_out),
        "plan": plan.fingerprint,
        "dataset": dataset.fingerprint,
        "edges": plan.config.edges,
        "most_tokens": max([plan.most_tokens, *(batch.tokens for batch in held_out)]),
        "most_anchors": max([plan.most_anchors, *(len(batch.anchors) for batch in held_out)]),
    }
    return RunBatches(BatchSource(dataset, plan, seed, per_anchor), held_out, facts, config.draft.mask_token_id)
