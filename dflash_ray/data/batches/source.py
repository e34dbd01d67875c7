"""Numbered batches with their tokens and anchors.

Batch k is a pure function of (data set, plan, seed): any k can be made without making the ones before it, on any machine, as often as
wanted. Anchors follow from (seed, epoch, sample) and do not depend on the batch a document stands in.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dflash_ray.config.schema import BatchingConfig
from dflash_ray.data.anchors import anchor_count, choose_anchors, fixed_anchors
from dflash_ray.data.batches.batch import Batch
from dflash_ray.data.batches.plan import RunPlan, make_plan
from dflash_ray.data.store.dataset import Dataset, Sample
from dflash_ray.random_streams import shuffled, stream


def plan_run(dataset: Dataset, config: BatchingConfig, tokens_per_anchor: float, seed: int, epochs: int) -> RunPlan:
    """The plan of a whole run over `dataset`; `config.strategy` is not auto."""
    counts = anchor_count(dataset.lengths, dataset.anchor_candidates, tokens_per_anchor)
    return RunPlan(dataset.lengths, counts, config, seed, epochs)


class BatchSource:
    """Training batches 0..run_plan.total_batches - 1."""

    def __init__(self, dataset: Dataset, run_plan: RunPlan, seed: int, tokens_per_anchor: float):
        self.dataset, self.run_plan, self.seed, self.tokens_per_anchor = dataset, run_plan, seed, tokens_per_anchor

    def batch(self, number: int) -> Batch:
        """Batch `number` of the run; IndexError past the end."""
        epoch, index = self.run_plan.locate_batch(number)
        plan = self.run_plan.epoch_plan(epoch)
        samples = self.dataset.read(plan.samples_of(index))
        return _join(number, epoch, samples, plan.layout, int(plan.buckets[index]), lambda sample: self._anchors(sample, epoch))

    def _anchors(self, sample: Sample, epoch: int) -> np.ndarray:
        return choose_anchors(sample.loss_mask, self.tokens_per_anchor, self.seed, epoch, sample.sample_id)


def validation_batches(
    dataset: Dataset, config: BatchingConfig, tokens_per_anchor: float, seed: int, count: int, layout: str
) -> list[Batch]:
    """At most `count` batches numbered from 0, the same with the same anchors at every validation of a run.

    They are full batches of `layout` (packed, or padded with neighbours in length) under the token budget of `config`; if the data set
    holds more than `count`, a random choice of them.
    """
    config = config.model_copy(update={"strategy": "packed" if layout == "packed" else "sorted"})
    counts = anchor_count(dataset.lengths, dataset.anchor_candidates, tokens_per_anchor)
    plan = make_plan(dataset.lengths, counts, config, seed, epoch=0)
    chosen = np.sort(shuffled(plan.batches, stream("validation batches", seed))[:count])
    batches = []
    for number, index in enumerate(chosen):
        samples = dataset.read(plan.samples_of(index))
        batches.append(_join(number, 0, samples, layout, -1, lambda s: fixed_anchors(s.loss_mask, tokens_per_anchor, seed, s.sample_id)))
    return batches


def _join(number: int, epoch: int, samples: list[Sample], layout: str, bucket: int, anchors_of: Callable[[Sample], np.ndarray]) -> Batch:
    starts = np.concatenate([[0], np.cumsum([len(sample.input_ids) for sample in samples])]).astype(np.int32)
    return Batch(
        number=number,
        epoch=epoch,
        sample_ids=np.array([sample.sample_id for sample in samples], np.int64),
        input_ids=np.concatenate([sample.input_ids for sample in samples]),
        cu_seqlens=starts,
        loss_mask=np.concatenate([sample.loss_mask for sample in samples]),
        anchors=np.concatenate([anchors_of(sample) + start for sample, start in zip(samples, starts[:-1], strict=True)]),
        layout=layout,
        bucket=bucket,
    )
