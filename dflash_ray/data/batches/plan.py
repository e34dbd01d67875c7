"""Which samples form which batch, for every epoch of a run, from sample lengths alone.

Every sample lands in exactly one batch of every epoch, whole. No batch exceeds the token budget (padded strategies: longest document x
documents, and max_rows documents). A plan is a pure function of (lengths, anchor counts, batching config, seed, epoch): never of timing,
of the number of targets, or of the plans before it. Batches are numbered over the whole run.

sorted    documents in order of length, cut into padded batches, the same every epoch: the fastest padded order, and no shuffling
random    a uniform shuffle cut into padded batches: full shuffling, and much padding
bucketed  a shuffle inside each length bucket cut into padded batches, all batches in random order
packed    a uniform shuffle packed end to end (see `packing`): full shuffling and no padding, for targets that isolate documents
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from dflash_ray.config.schema import BatchingConfig
from dflash_ray.data.batches.edges import best_edges
from dflash_ray.data.batches.packing import pack
from dflash_ray.random_streams import shuffled, stream

STRATEGIES = ("sorted", "random", "bucketed", "packed")
EPOCHS_KEPT = 2  # plans in memory at a time (16 MB each for 902,087 samples); others are made again when asked for


@dataclass(frozen=True)
class EpochPlan:
    epoch: int
    samples: np.ndarray  # int64 [N]: sample indices, batch after batch
    offsets: np.ndarray  # int64 [B+1]: batch b holds samples[offsets[b] : offsets[b+1]]
    buckets: np.ndarray  # int64 [B]: bucket of each batch, -1 if the strategy has none
    layout: str  # packed | padded

    @property
    def batches(self) -> int:
        return len(self.buckets)

    @property
    def documents(self) -> np.ndarray:
        """int64 [B]: documents of each batch."""
        return np.diff(self.offsets)

    def samples_of(self, index: int) -> np.ndarray:
        """int64 sample indices of batch `index` of the epoch, 0..B-1."""
        return self.samples[self.offsets[index] : self.offsets[index + 1]]

    def sums(self, values: np.ndarray) -> np.ndarray:
        """int64 [B]: sum over each batch's documents of `values` [N], given by sample index (lengths: real tokens; anchor counts)."""
        return np.add.reduceat(np.asarray(values, np.int64)[self.samples], self.offsets[:-1])

    def allocated(self, lengths: np.ndarray) -> np.ndarray:
        """int64 [B]: tokens a target allocates for each batch."""
        if self.layout == "packed":
            return self.sums(lengths)
        longest = np.maximum.reduceat(np.asarray(lengths, np.int64)[self.samples], self.offsets[:-1])
        return longest * self.documents


def resolve_strategy(config: BatchingConfig, target_isolates_documents: bool) -> tuple[str, str]:
    """(strategy, the reason in words). `target_isolates_documents`: its forward pass keeps documents laid end to end apart."""
    if config.strategy == "auto":
        if target_isolates_documents:
            return "packed", "packed, because the target isolates documents laid end to end"
        return "bucketed", "bucketed, because the target does not isolate documents laid end to end"
    if config.strategy == "packed" and not target_isolates_documents:
        raise ValueError("batching.strategy packed: this target mixes documents laid end to end; use bucketed")
    return config.strategy, f"{config.strategy}, as batching.strategy says"


def refuse_over_budget(lengths: np.ndarray, config: BatchingConfig) -> None:
    over = np.flatnonzero(lengths > config.token_budget)
    if len(over):
        others = f" (and {len(over) - 1:,} others are too long)" if len(over) > 1 else ""
        raise ValueError(
            f"sample {over[0]} has {lengths[over[0]]} tokens, over batching.token_budget {config.token_budget}{others}; raise "
            f"batching.token_budget to {lengths[over].max()} or more, or prepare the data with a smaller --max-length"
        )


def resolve_edges(lengths: np.ndarray, config: BatchingConfig) -> list[int]:
    """The bucket edges to use: the configured ones if they cover `lengths`, the best ones for `edges: auto`."""
    refuse_over_budget(lengths, config)
    if config.edges == "auto":
        return best_edges(lengths, config.buckets, config.token_budget, config.max_rows, config.grid).edges
    edges = list(config.edges)
    if len(edges) < 2 or edges[0] != 0 or any(low >= high for low, high in zip(edges, edges[1:], strict=False)):
        raise ValueError(f"batching.edges {edges}: give ascending edges that start with 0, for instance 0,770,8192")
    if edges[-1] < lengths.max():
        raise ValueError(f"batching.edges: the last edge {edges[-1]} is below the longest sample, {lengths.max()} tokens; raise it")
    return edges


def make_plan(
    lengths: np.ndarray, anchor_counts: np.ndarray, config: BatchingConfig, seed: int, epoch: int, edges: list[int] | None = None
) -> EpochPlan:
    """The plan of one epoch. lengths, anchor_counts: int [N]; `config.strategy` is not auto; `edges` default to `resolve_edges`."""
    lengths, anchor_counts = np.asarray(lengths, np.int64), np.asarray(anchor_counts, np.int64)
    refuse_over_budget(lengths, config)
    assert config.strategy in STRATEGIES, config.strategy
    if config.strategy == "sorted":
        samples = np.argsort(lengths, kind="stable")
        offsets = _cut_padded(lengths[samples], config)
        return EpochPlan(epoch, samples, offsets, np.full(len(offsets) - 1, -1), "padded")
    words = stream("plan", seed, epoch)
    samples = shuffled(len(lengths), words)
    if config.strategy == "random":
        offsets = _cut_padded(lengths[samples], config)
        return EpochPlan(epoch, samples, offsets, np.full(len(offsets) - 1, -1), "padded")
    if config.strategy == "packed":
        places, offsets = pack(lengths[samples], anchor_counts[samples], config.token_budget, config.lookahead)
        return EpochPlan(epoch, samples[places], offsets, np.full(len(offsets) - 1, -1), "packed")
    edges = edges or resolve_edges(lengths, config)
    bucket = np.searchsorted(edges[1:], lengths[samples]).astype(np.int16)
    by_bucket = np.argsort(bucket, kind="stable")
    samples, bucket = samples[by_bucket], bucket[by_bucket]
    bounds = np.searchsorted(bucket, np.arange(len(edges)))
    parts = [_cut_padded(lengths[samples[low:high]], config) + low for low, high in zip(bounds[:-1], bounds[1:], strict=True)]
    offsets = np.concatenate([[0], *(part[1:] for part in parts)])
    order = shuffled(len(offsets) - 1, words)
    samples, mixed = _reorder(samples, offsets, order)
    return EpochPlan(epoch, samples, mixed, bucket[offsets[:-1]][order].astype(np.int64), "padded")


class RunPlan:
    """All epochs of a run: `total_batches` batches numbered from 0, epoch after epoch.

    config: the batching config with strategy and edges resolved; tokens: real tokens of all epochs; allocated_tokens: with padding;
    most_tokens, most_allocated, most_anchors, most_documents: the largest of any batch; fingerprint: hex digest of the whole plan.
    """

    def __init__(self, lengths: np.ndarray, anchor_counts: np.ndarray, config: BatchingConfig, seed: int, epochs: int):
        """lengths, anchor_counts: int [N]; `config.strategy` is not auto."""
        self._lengths, self._anchor_counts = np.asarray(lengths, np.int64), np.asarray(anchor_counts, np.int64)
        refuse_over_budget(self._lengths, config)
        if config.strategy == "bucketed":
            config = config.model_copy(update={"edges": resolve_edges(self._lengths, config)})
        self.config, self.seed, self.epochs = config, seed, epochs
        self.tokens = int(self._lengths.sum()) * epochs
        self.allocated_tokens = 0
        self.most_tokens = self.most_allocated = self.most_anchors = self.most_documents = 0
        self._plans: dict[int, EpochPlan] = {}
        digest = hashlib.sha256(self._lengths.tobytes() + self._anchor_counts.tobytes())
        batches = np.zeros(epochs, np.int64)
        for epoch in reversed(range(epochs)):  # the first epochs are the ones left in memory
            plan = self.epoch_plan(epoch)
            batches[epoch] = plan.batches
            digest.update(plan.layout.encode() + plan.samples.tobytes() + plan.offsets.tobytes())
            allocated = plan.allocated(self._lengths)
            self.allocated_tokens += int(allocated.sum())
            self.most_allocated = max(self.most_allocated, int(allocated.max()))
            self.most_tokens = max(self.most_tokens, int(plan.sums(self._lengths).max()))
            self.most_anchors = max(self.most_anchors, int(plan.sums(self._anchor_counts).max()))
            self.most_documents = max(self.most_documents, int(plan.documents.max()))
        self._first_batch = np.concatenate([[0], np.cumsum(batches)])
        self.total_batches = int(batches.sum())
        self.fingerprint = digest.hexdigest()[:32]

    def steps(self, batches_per_step: int) -> int:
        """Optimizer steps of the whole run; only the last one may have fewer batches."""
        return -(-self.total_batches // batches_per_step)

    def epoch_plan(self, epoch: int) -> EpochPlan:
        if epoch not in self._plans:
            while len(self._plans) >= EPOCHS_KEPT:
                del self._plans[next(iter(self._plans))]
            self._plans[epoch] = make_plan(self._lengths, self._anchor_counts, self.config, self.seed, epoch)
        return self._plans[epoch]

    def locate_batch(self, number: int) -> tuple[int, int]:
        """(epoch, index in that epoch's plan) of batch `number`; IndexError past the end."""
        if not 0 <= number < self.total_batches:
            raise IndexError(f"batch {number} of a run with {self.total_batches}")
        epoch = int(np.searchsorted(self._first_batch, number, side="right")) - 1
        return epoch, number - int(self._first_batch[epoch])


def _cut_padded(lengths: np.ndarray, config: BatchingConfig) -> np.ndarray:
    """int64 [B+1] offsets: in this order, each batch takes documents while the longest so far x documents stays within the budget."""
    offsets, first, longest = [0], 0, 0
    budget, max_rows = config.token_budget, config.max_rows
    for at, length in enumerate(lengths.tolist()):
        if length > longest:
            longest = length
        if (at - first + 1) * longest > budget or at - first == max_rows:
            offsets.append(at)
            first, longest = at, length
    if len(lengths):
        offsets.append(len(lengths))
    return np.array(offsets, np.int64)


def _reorder(samples: np.ndarray, offsets: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(samples, offsets) with the batches in `order`."""
    documents = np.diff(offsets)[order]
    mixed = np.concatenate([[0], np.cumsum(documents)])
    within = np.arange(len(samples)) - np.repeat(mixed[:-1], documents)
    return samples[np.repeat(offsets[:-1][order], documents) + within], mixed
