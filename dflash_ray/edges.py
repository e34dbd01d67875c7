"""Bucket edges by dynamic programming: the least expected padded tokens that any edges on the grid can have.

The cost of a bucket is what the packing rule of the padded strategies is expected to allocate for its samples. The rule: documents in
random order join a batch while (longest so far) x rows stays within the token budget and rows within max_rows. A batch reaches r rows
if and only if its first r documents are no longer than y_r = budget / r, so for independent draws from a bucket with distribution F

    P(rows >= r) = F(y_r)^r,    tokens allocated per sample = E[rows x longest] / E[rows],

with E[longest of r | all <= y] = y - integral of (F(t) / F(y))^r dt up to y. Both are sums over r that all pairs of edges share, which
makes the whole table one pass over the grid per r. The programme then picks the edges; nothing is searched locally. Counts and token
sums are int64 or float64 throughout (902,087 samples of 65,536 allocated tokens do not fit in 32 bits).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_CELLS = 512  # candidate edges; a finer grid is coarsened to this many


@dataclass(frozen=True)
class Edges:
    edges: list[int]  # 0 first, the longest length last; bucket i holds lengths in (edges[i], edges[i+1]]
    expected_tokens: float  # allocated tokens the packing rule is expected to need for all samples
    expected_efficiency: float  # real tokens / expected_tokens
    grid: int  # distance of the candidate edges, in tokens


def best_edges(lengths: np.ndarray, buckets: int, budget: int, max_rows: int, grid: int = 32) -> Edges:
    """The optimal edges for int64 `lengths` [N] (all in 1..budget) with at most `buckets` buckets.

    Fewer come back where the lengths fill fewer cells of the grid. The grid is coarsened until at most MAX_CELLS cells hold samples.
    """
    lengths = np.sort(np.asarray(lengths, np.int64))
    step = grid
    while len(tops := np.unique(-(-lengths // step) * step)) > MAX_CELLS:
        step += grid
    tops[-1] = lengths[-1]
    cost = allocation_table(lengths, tops, budget, max_rows)
    cells = len(tops)
    best = np.full(cells + 1, np.inf)
    best[0] = 0.0
    choices = []
    for _ in range(min(buckets, cells)):
        through = best[:, None] + cost  # [start, end]: cheapest with the last bucket (start, end]
        choice = np.argmin(through, axis=0)
        choices.append(choice)
        best = np.minimum(through[choice, np.arange(cells + 1)], np.inf)
    edges, end = [], cells
    for choice in reversed(choices):
        edges.append(int(tops[end - 1]))
        end = int(choice[end])
    total = float(best[cells])
    return Edges([0, *reversed(edges)], total, float(lengths.sum()) / total, step)


def expected_tokens(lengths: np.ndarray, edges: list[int], budget: int, max_rows: int) -> np.ndarray:
    """float64 [buckets]: tokens the packing rule is expected to allocate in each bucket of the given edges (0 where it is empty)."""
    lengths = np.sort(np.asarray(lengths, np.int64))
    out = np.zeros(len(edges) - 1)
    for bucket, (low, high) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        part = lengths[np.searchsorted(lengths, low, side="right") : np.searchsorted(lengths, high, side="right")]
        if len(part):
            cells = min(MAX_CELLS, int(part[-1] - part[0]) + 1)
            tops = np.unique(np.linspace(part[0], part[-1], cells).astype(np.int64))
            out[bucket] = allocation_table(part, tops, budget, max_rows)[0, -1]
    return out


def allocation_table(lengths: np.ndarray, tops: np.ndarray, budget: int, max_rows: int) -> np.ndarray:
    """float64 [M+1, M+1]: entry (i, j), i < j, is the expected allocation of a bucket of cells i+1..j; infinite elsewhere.

    lengths: int64 [N] ascending; tops: int64 [M] upper ends of the cells, ascending, the last one at least the longest length. Between
    the shortest and the longest length of a cell the distribution is taken as even.
    """
    ends = np.searchsorted(lengths, tops, side="right")
    starts = np.concatenate([[0], ends[:-1]])
    filled = ends > starts
    assert filled.all(), "every cell must hold samples"
    low, high = lengths[starts], lengths[ends - 1]
    return _table(lengths, starts, ends, low, high, budget, max_rows)


def _table(lengths, starts, ends, low, high, budget, max_rows):
    cells = len(ends)
    before = np.concatenate([[0], ends]).astype(np.float64)  # samples up to each candidate edge
    sure = np.minimum(max_rows, budget // high)  # rows that fit whatever is drawn, per cell as the last of a bucket
    rows = np.broadcast_to(sure, (cells, cells)).astype(np.float64).copy()  # E[rows], [start, end cell]
    tokens = np.zeros((cells, cells))  # E[rows x longest]
    size = ends[None, :] - before[:-1, None]  # samples of bucket (start, end cell]
    inside = size > 0
    log_size = np.log(np.where(inside, size, 1.0))
    most = int(min(max_rows, budget // lengths[0]))
    for r in range(1, most + 1):
        limit = budget // r
        last = min(int(np.searchsorted(high, limit, side="right")), cells)  # cells wholly within the limit
        longest, longest_less = _longest(r, before, low, high, last), None
        at = np.flatnonzero(sure[:last] == r)
        tokens[:, at] += r * longest[:, at]
        if last == cells or r == 1:
            continue
        # documents up to the limit: the whole cells and a part of the next one
        upto = float(np.searchsorted(lengths, limit, side="right"))
        top = float(lengths[int(upto) - 1]) if upto else 0.0
        longest_less = _longest(r - 1, before, low, high, last)
        own = _extend(longest, r, before, low, high, last, upto, top)
        less = _extend(longest_less, r - 1, before, low, high, last, upto, top)
        gain = r * own - (r - 1) * less
        below = upto - before[:-1]
        some = below > 0
        log_below = np.log(np.where(some, below, 1.0))
        later = np.flatnonzero(sure < r)
        chance = np.exp(r * (log_below[:, None] - log_size[:, later])) * (some[:, None] & inside[:, later])
        rows[:, later] += chance
        tokens[:, later] += chance * gain[:, None]
    out = np.full((cells + 1, cells + 1), np.inf)
    out[:-1, 1:] = np.where(inside, size * tokens / rows, np.inf)
    return out


def _longest(r, before, low, high, last):
    """[start, end cell] expected longest of r documents of cells start+1..end, for the first `last` end cells."""
    cells = len(high)
    out = np.zeros((cells, max(last, 1)))
    area = np.zeros(cells)  # integral of (F(t) / F(top))^r up to the top
    for j in range(last):
        size = before[j + 1] - before[: j + 1]
        ratio = (before[j] - before[: j + 1]) / size
        power = ratio**r
        spread = high[j] - low[j]
        gap = low[j] - high[j - 1] if j else 0
        area[: j + 1] = (area[: j + 1] + gap) * power + spread * _ramp(ratio, power, r)
        out[: j + 1, j] = high[j] - area[: j + 1]
    return out


def _ramp(ratio, power, r):
    """Mean of x^r over x from `ratio` to 1."""
    return (1 - power * ratio) / ((r + 1) * (1 - ratio))


def _extend(longest, r, before, low, high, last, upto, top):
    """[start] expected longest of r documents no longer than `top`, which lies inside cell `last` (or is that of the cell before)."""
    cells = len(high)
    start = np.arange(cells)
    below = upto - before[:-1]
    some = below > 0
    size = np.where(some, below, 1.0)
    whole = before[last] - before[:-1]  # samples in whole cells
    ratio = np.clip(np.where(some, whole / size, 0.0), 0.0, 1.0)
    if last and upto == before[last]:
        return np.where(start < last, longest[:, last - 1], top)
    power = ratio**r
    area = np.where((start < last) & (last > 0), (high[last - 1] - longest[:, last - 1]) if last else 0.0, 0.0)
    gap = low[last] - high[last - 1] if last else 0
    full = (area + gap) * power + (top - low[last]) * _ramp(np.minimum(ratio, 1 - 1e-12), power, r)
    return np.where(some, top - full, top)
