"""What each batching strategy makes of a set of lengths, in numbers.

Two numbers are kept apart: padding efficiency (real tokens / allocated tokens) and target time, which comes from a measured table of
speeds by batch size. Neither says anything about shuffling; `composition_change` and `shuffle_bias` do.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from dflash_ray.config.schema import BatchingConfig
from dflash_ray.data.batches.edges import best_edges, expected_tokens
from dflash_ray.data.batches.plan import STRATEGIES, EpochPlan, make_plan, refuse_over_budget, resolve_edges
from dflash_ray.random_streams import shuffled, stream


def batching_report(lengths: np.ndarray, anchor_counts: np.ndarray, config: BatchingConfig, seed: int) -> dict[str, Any]:
    """JSON-able figures of the four strategies on int `lengths` [N] with `anchor_counts` [N].

    samples, tokens, longest; optimizer {seconds, searched, grid, expected_efficiency}; bucketed {edges, buckets}; strategies {name:
    batches, rows_*, padding_efficiency, fill, relative_target_time (sorted = 1), composition_change, anchors_*, plan_seconds}.
    """
    lengths, anchor_counts = np.asarray(lengths, np.int64), np.asarray(anchor_counts, np.int64)
    refuse_over_budget(lengths, config)
    started = time.perf_counter()
    searched = config.edges == "auto"
    if searched:
        found = best_edges(lengths, config.buckets, config.token_budget, config.max_rows, config.grid)
        edges, grid = found.edges, found.grid
    else:
        edges, grid = resolve_edges(lengths, config), None
    seconds = time.perf_counter() - started
    expected = expected_tokens(lengths, edges, config.token_budget, config.max_rows)

    strategies: dict[str, dict[str, Any]] = {}
    buckets: list[dict[str, Any]] = []
    for name in STRATEGIES:
        chosen = config.model_copy(update={"strategy": name, "edges": edges})
        started = time.perf_counter()
        plan = make_plan(lengths, anchor_counts, chosen, seed, epoch=0)
        plan_seconds = time.perf_counter() - started
        strategies[name] = _figures(plan, lengths, anchor_counts, config)
        strategies[name]["plan_seconds"] = plan_seconds
        following = make_plan(lengths, anchor_counts, chosen, seed, epoch=1)
        strategies[name]["composition_change"] = composition_change(plan, following)
        if name == "bucketed":
            strategies[name]["edges"] = edges
            buckets = _bucket_figures(plan, lengths, edges, expected)
        if name == "packed":
            strategies[name]["shuffle_bias"] = shuffle_bias(plan, lengths, seed)
    for figures in strategies.values():
        figures["relative_target_time"] = figures["target_seconds"] / strategies["sorted"]["target_seconds"]
    return {
        "samples": len(lengths),
        "tokens": int(lengths.sum()),
        "longest": int(lengths.max()),
        "token_budget": config.token_budget,
        "max_rows": config.max_rows,
        "seed": seed,
        "strategies": strategies,
        "bucketed": {"edges": edges, "buckets": buckets},
        "optimizer": {
            "seconds": seconds,
            "searched": searched,
            "grid": grid,
            "expected_efficiency": float(lengths.sum() / expected.sum()),
        },
    }


def target_seconds(plan: EpochPlan, lengths: np.ndarray, speed: dict[int, float]) -> float:
    """One target's time for the epoch: allocated tokens of each batch / the measured tokens per second at that batch size.

    Between the sizes of the table speed is interpolated, outside it the nearest entry holds.
    """
    sizes = sorted(speed)
    allocated = plan.allocated(lengths).astype(np.float64)
    return float((allocated / np.interp(allocated, sizes, [speed[size] for size in sizes])).sum())


def composition_change(plan: EpochPlan, following: EpochPlan) -> float:
    """Share of the pairs of samples in one batch of `plan` that are in different batches of `following` (0 if there is no pair)."""
    batch_of = np.empty(len(plan.samples), np.int64)
    batch_of[following.samples] = np.repeat(np.arange(following.batches), following.documents)
    key = np.repeat(np.arange(plan.batches), plan.documents) * following.batches + batch_of[plan.samples]
    together = np.unique(key, return_counts=True)[1]
    pairs = int((plan.documents * (plan.documents - 1)).sum())
    return 1.0 - int((together * (together - 1)).sum()) / pairs if pairs else 0.0


def shuffle_bias(plan: EpochPlan, lengths: np.ndarray, seed: int) -> dict[str, float]:
    """How far a packed plan is from the uniform shuffle it was made of, in places (documents).

    max_displacement and mean_displacement: distance of a document's place from its place in the shuffle; shortest_tenth, longest_tenth:
    mean signed distance (below 0 = earlier) of those documents; length_correlation: of signed distance and length; drift: largest
    difference of the mean length of a hundredth of the epoch from the whole mean, in standard errors of a uniform shuffle.
    """
    place = np.empty(len(plan.samples), np.int64)
    place[shuffled(len(plan.samples), stream("plan", seed, plan.epoch))] = np.arange(len(plan.samples))
    moved = np.arange(len(plan.samples)) - place[plan.samples]
    length = lengths[plan.samples].astype(np.float64)
    by_length = np.argsort(length, kind="stable")
    tenth = max(1, len(length) // 10)
    varied = length.std() > 0 and moved.std() > 0
    parts = np.array_split(length, min(100, len(length)))
    error = length.std() / np.sqrt(len(parts[0])) or 1.0
    return {
        "max_displacement": int(np.abs(moved).max()),
        "mean_displacement": float(np.abs(moved).mean()),
        "shortest_tenth": float(moved[by_length[:tenth]].mean()),
        "longest_tenth": float(moved[by_length[-tenth:]].mean()),
        "length_correlation": float(np.corrcoef(moved, length)[0, 1]) if varied else 0.0,
        "drift": float(max(abs(part.mean() - length.mean()) for part in parts) / error),
    }


def _figures(plan: EpochPlan, lengths: np.ndarray, anchor_counts: np.ndarray, config: BatchingConfig) -> dict[str, Any]:
    allocated, documents, anchors = plan.allocated(lengths), plan.documents, plan.sums(anchor_counts)
    return {
        "batches": plan.batches,
        "rows_min": int(documents.min()),
        "rows_mean": float(documents.mean()),
        "rows_max": int(documents.max()),
        "allocated_tokens": int(allocated.sum()),
        "padding_efficiency": int(lengths.sum()) / int(allocated.sum()),
        "fill": int(allocated.sum()) / (plan.batches * config.token_budget),
        "target_seconds": target_seconds(plan, lengths, config.speed),
        "anchors_mean": float(anchors.mean()),
        "anchors_max": int(anchors.max()),
        "anchors_variation": float(anchors.std() / anchors.mean()) if anchors.any() else 0.0,
    }


def _bucket_figures(plan: EpochPlan, lengths: np.ndarray, edges: list[int], expected: np.ndarray) -> list[dict[str, Any]]:
    allocated, real = plan.allocated(lengths), plan.sums(lengths)
    out = []
    for bucket, (low, high) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        mine = plan.buckets == bucket
        samples, tokens = int(plan.documents[mine].sum()), int(real[mine].sum())
        out.append(
            {
                "above": low,
                "up_to": high,
                "samples": samples,
                "batches": int(mine.sum()),
                "mean_length": tokens / samples if samples else 0.0,
                "rows_mean": samples / int(mine.sum()) if samples else 0.0,
                "padding_efficiency": tokens / int(allocated[mine].sum()) if samples else 0.0,
                "expected_efficiency": tokens / float(expected[bucket]) if samples else 0.0,
            }
        )
    return out
