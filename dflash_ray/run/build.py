"""From what a run is (`RunSpec`) to the library objects that its actors work with: target, trainer, batches."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_ray.config.schema import Config
from dflash_ray.run.spec import RunSpec, weights_fingerprint

if TYPE_CHECKING:
    from dflash_ray.data.batches.batch import Batch
    from dflash_ray.data.batches.source import BatchSource
    from dflash_ray.data.store.dataset import Dataset
    from dflash_ray.draft.trainer import DraftTrainer
    from dflash_ray.target.model import FrozenTarget


@contextmanager
def _same_weights(spec: RunSpec) -> Iterator[None]:
    """Read inside what belongs to the target. ValueError where its folder holds other weights on this node than where the run was started,
    or by now: before anything is read, and once more afterwards, because reading takes its time."""
    _refuse_other_weights(spec)
    yield
    _refuse_other_weights(spec)


def _refuse_other_weights(spec: RunSpec) -> None:
    if spec.weights and weights_fingerprint(spec.config) != spec.weights:
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
        embed = head = random_embedding(spec.target_shape, spec.config.run.seed, spec.device)
        tables = f"random {spec.device} {spec.config.run.seed}"
    else:
        with _same_weights(spec):
            embed, head, tables = embedding_and_head(spec.config.target.path)
    return DraftTrainer(spec.config, spec.shape, embed, head, spec.device, total_steps, tables=tables)


@dataclass(frozen=True)
class PlanInfo:
    """What a run's plan adds up to; samples, tokens, batches and anchors are counts over all epochs, `most_` is of any one batch."""

    samples: int  # of one epoch
    tokens: int
    batches: int
    validation_batches: int  # of one pass
    plan: str  # fingerprint of which samples form which batch
    dataset: str  # fingerprint
    most_tokens: int
    most_anchors: int


class RunBatches:
    """All batches of a run, training and validation; `info` tells what they add up to."""

    def __init__(self, train: BatchSource, validation: list[Batch], info: PlanInfo, mask_token: int):
        self._train, self._validation, self.info, self._mask_token = train, validation, info, mask_token

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
    info = PlanInfo(
        samples=len(dataset),
        tokens=plan.tokens,
        batches=plan.total_batches,
        validation_batches=len(held_out),
        plan=plan.fingerprint,
        dataset=dataset.fingerprint,
        most_tokens=max([plan.most_tokens, *(batch.tokens for batch in held_out)]),
        most_anchors=max([plan.most_anchors, *(len(batch.anchors) for batch in held_out)]),
    )
    return RunBatches(BatchSource(dataset, plan, seed, per_anchor), held_out, info, config.draft.mask_token_id)
