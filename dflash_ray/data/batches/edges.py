"""Bucket edges by dynamic programming: no edges on the grid are expected to need fewer allocated tokens.

The cost of a bucket is what the rule of the padded strategies is expected to allocate for its samples: documents in random order join a
batch while (longest so far) x rows stays within the token budget and rows within max_rows; the one that no longer fits starts the next
batch. `allocation_table` works that out for every pair of candidate edges, the programme picks the best chain of pairs, and nothing is
searched locally. Counts and token sums are int64 or float64 throughout (1.9e9 tokens do not fit in 32 bits).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

MAX_CELLS = 512  # most candidate edges; a grid with more is doubled
_QUANTILES = 128  # further candidates, where many samples lie close together
_TERMS = 4  # summands of the carried sum in the search; with three buckets or more the rest is under 0.05% of the tokens
_NEGLIGIBLE = 1e-9  # chance of a batch size below which it is left out


@dataclass(frozen=True)
class Edges:
    edges: list[int]  # 0 first, the longest length last; bucket i holds lengths in (edges[i], edges[i+1]]
    expected_tokens: float  # allocated tokens that the packing rule is expected to need for all samples
    grid: int  # distance of the candidate edges, in tokens


def best_edges(lengths: np.ndarray, buckets: int, budget: int, max_rows: int, grid: int = 32) -> Edges:
    """The optimal edges for int `lengths` [N], all in 1..budget, with at most `buckets` buckets.

    Fewer come back where the lengths fill fewer cells of the grid. A grid on which more than MAX_CELLS cells hold samples is doubled.
    """
    lengths = np.sort(np.asarray(lengths, np.int64))
    tops, grid = _candidates(lengths, grid)
    cost = allocation_table(lengths, tops, budget, max_rows)
    best, choices = cost[0], []  # [last cell]: least allocation of all samples up to it with the buckets so far
    for _ in range(min(buckets, len(tops)) - 1):
        through = np.append(0.0, best[:-1])[:, None] + cost  # [first cell of the last bucket, its last cell]
        choices.append(np.argmin(through, axis=0))
        best = np.min(through, axis=0)
    edges, last = [int(tops[-1])], len(tops) - 1
    while choices and (first := int(choices.pop()[last])) > 0:
        last = first - 1
        edges.append(int(tops[last]))
    return Edges([0, *reversed(edges)], float(best[-1]), grid)


def _candidates(lengths: np.ndarray, grid: int) -> tuple[np.ndarray, int]:
    """(upper ends of the cells, distance of the grid): multiples of the grid, and quantiles where there is room for them."""
    distinct = np.unique(lengths)
    while len(tops := np.unique(-(-distinct // grid) * grid)) > MAX_CELLS:
        grid *= 2
    tops[-1] = lengths[-1]
    finer = np.union1d(tops, _quantiles(lengths, _QUANTILES))
    finer = finer[np.diff(np.searchsorted(lengths, finer, side="right"), prepend=0) > 0]
    return (finer if len(finer) <= MAX_CELLS else tops), grid


def _quantiles(lengths: np.ndarray, count: int) -> np.ndarray:
    """Ascending tops at `count` quantiles of the sorted lengths. A length that many samples share gets a cell of its own."""
    quantiles, times = np.unique(lengths[np.linspace(0, len(lengths) - 1, count).astype(np.int64)], return_counts=True)
    first = np.searchsorted(lengths, quantiles[times > 1])
    return np.union1d(quantiles, lengths[first[first > 0] - 1])


def expected_tokens(lengths: np.ndarray, edges: list[int], budget: int, max_rows: int) -> np.ndarray:
    """float64 [buckets]: tokens the packing rule is expected to allocate in each bucket of the given edges (0 where it is empty)."""
    lengths = np.sort(np.asarray(lengths, np.int64))
    bounds = np.searchsorted(lengths, edges, side="right")
    out = np.zeros(len(edges) - 1)
    for bucket, (first, last) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        part = lengths[first:last]
        if len(part):
            out[bucket] = allocation_table(part, _quantiles(part, MAX_CELLS), budget, max_rows, starts=1)[0, -1]
    return out


def allocation_table(lengths: np.ndarray, tops: np.ndarray, budget: int, max_rows: int, starts: int | None = None) -> np.ndarray:
    """float64 [S, M]: entry (i, j), i <= j, is the expected allocation of a bucket of cells i..j; infinite elsewhere.

    lengths: int64 [N] ascending; tops: int64 [M] upper ends of the cells, ascending, each cell with samples. Between the shortest and
    the longest length of a cell its samples are taken as evenly spread. S = `starts`, by default M.

    Derivation, for a bucket with distribution F of lengths and y_r = budget // r. A batch reaches r rows if and only if its first r
    documents are no longer than y_r. All but the first are independent draws; the first one has a distribution P of its own, because a
    long document is likelier to be the one that no longer fits. In the long run, with w_r = P(y_r) F(y_r)^(r-2),

        P(y) = F(y) (1 - sum over r of w_r (1 - F(y_r))) + sum over r with y_r < y of w_r (F(y) - F(y_r)),

    which is solved from the largest r down, up to the factor that makes P(longest) = 1. Tokens per sample = E[rows x longest] / E[rows],
    E[rows] = sum of P(y_r) F(y_r)^(r-1), and E[rows x longest] = sum of r (A_r - B_r), where A_r is the mean of the longest of the first
    r documents over batches that reach r rows and B_r over those that reach r + 1, each times the chance of it. Integrating P F^(r-1) by
    parts turns them into sums of m(r, y), the mean longest of r draws no longer than y, which all buckets with the same start share.
    """
    cells = _Cells(lengths, tops, starts or len(tops))
    size = np.maximum(cells.upto_top - cells.upto_start[:, None], 1.0)  # [start, end] samples of the bucket
    sure = np.minimum(max_rows, budget // cells.high)  # [end] rows that fit whatever is drawn, falling
    most = int(min(max_rows, budget // lengths[0]))
    w, wf, rows, tokens = np.zeros((4, *size.shape))  # sums over r of w_r, w_r F(y_r), P(y_r) F(y_r)^(r-1), r (A_r - B_r)
    larger: deque[tuple[int, np.ndarray, np.ndarray]] = deque(maxlen=None if starts else _TERMS)  # (p, w_p, F(y_p)) of the last few p > r
    longest = cells.mean_longest(most, budget // most)
    for r in range(most, int(sure[-1]) - 1, -1):
        fewer = cells.mean_longest(r - 1, budget // max(r - 1, 1))
        within = cells.upto(budget // r)
        first, unsure = np.searchsorted(-sure, (-r, -r + 1))  # ends from `first` on: no more rows are sure; from `unsure` on: fewer are
        last = np.searchsorted(cells.upto_top, within * _NEGLIGIBLE ** (-1 / max(r - 1, 1)), side="right")
        end, always = np.s_[:, first:last], np.s_[:, : unsure - first]

        carried, reached = 0.0, 0.0  # sum over p > r of w_p F(y_p)^r (m(r, y_p) - m(r - 1, y_p)), and B_r
        for p, w_p, f_p in larger:
            w_p, f_p = w_p[end], f_p[end]
            own, less = cells.at(r, longest, budget // p), cells.at(r - 1, fewer, budget // p)
            if p == r + 1:
                reached = f_p**r * ((1 + w[end] - w_p) * f_p * own - (wf[end] - w_p * f_p) * less) - f_p * carried
            carried = carried + w_p * f_p**r * (own - less)

        f = np.maximum(within - cells.upto_start[:, None], 0.0) / size[end]
        f[always] = 1.0
        own, less = (
            np.broadcast_to(part, f.shape).copy() for part in (cells.at(r, longest, budget // r), cells.at(r - 1, fewer, budget // r))
        )
        own[always], less[always] = longest[:, first:unsure], fewer[:, first:unsure]
        power = f ** (r - 1)
        tokens[end] += r * (power * ((1 + w[end]) * f * own - wf[end] * less) - carried - reached)
        first_document = f * (1 + w[end]) - wf[end]  # P(y_r)
        first_document[always] = 0.0
        w_r, f_r = np.zeros((2, *size.shape))
        w_r[end], f_r[end] = np.divide(power * first_document, f, out=np.zeros_like(f), where=f > 0), f
        rows[end] += power * first_document
        w += w_r
        wf += w_r * f_r
        larger.append((r, w_r, f_r))
        longest = fewer
    scale = 1 / (1 + w - wf)
    ordered = np.arange(len(tops)) >= np.arange(len(size))[:, None]
    return np.where(ordered, size * tokens * scale / (sure + rows * scale), np.inf)


class _Cells:
    """Samples counted by cell of the grid; S possible first cells of a bucket, M possible last ones."""

    def __init__(self, lengths: np.ndarray, tops: np.ndarray, starts: int):
        ends = np.searchsorted(lengths, tops, side="right")
        assert (np.diff(ends, prepend=0) > 0).all(), "a cell without samples"
        self._lengths = lengths
        self.upto_top = ends.astype(np.float64)  # [M] samples up to each cell's top
        self.upto_start = np.append(0.0, self.upto_top[:-1])[:starts]  # [S] samples before each first cell
        self.low, self.high = lengths[np.append(0, ends[:-1])], lengths[ends - 1]  # [M] shortest and longest of each cell

    def upto(self, length: int) -> float:
        return float(np.searchsorted(self._lengths, length, side="right"))

    def mean_longest(self, r: int, limit: int) -> np.ndarray:
        """[S, M] m(r, top of the last cell), for last cells with no sample over `limit` (else 0)."""
        out = np.zeros((len(self.upto_start), len(self.high)))
        area = np.zeros(len(self.upto_start))
        for cell in range(int(np.searchsorted(self.high, limit, side="right")) if r else 0):
            some = slice(0, min(cell + 1, len(area)))
            gap = self.low[cell] - self.high[cell - 1] if cell else 0
            area[some] = self._grown(area[some], some, cell, self.upto_top[cell], gap, self.high[cell] - self.low[cell], r)
            out[some, cell] = self.high[cell] - area[some]
        return out

    def at(self, r: int, longest: np.ndarray, limit: int) -> np.ndarray:
        """[S, 1] m(r, limit), from `longest` = mean_longest(r, limit or more); 0 for starts with no sample up to the limit."""
        cell = int(np.searchsorted(self.high, limit, side="right"))
        count = self.upto(limit)
        out = np.zeros((len(self.upto_start), 1))
        if cell:
            out[:, 0] = longest[:, cell - 1]
        if r and cell < len(self.high) and self.low[cell] <= limit:
            top = int(self._lengths[int(count) - 1])
            some = slice(0, min(cell + 1, len(out)))
            area = np.zeros(some.stop)
            if cell:
                area[:cell] = self.high[cell - 1] - out[:cell, 0]
            gap = self.low[cell] - self.high[cell - 1] if cell else 0
            out[some, 0] = top - self._grown(area, some, cell, count, gap, top - self.low[cell], r)
        return out

    def _grown(self, area: np.ndarray, some: slice, cell: int, count: float, gap: int, spread: int, r: int) -> np.ndarray:
        """The integral of (share of samples up to t, of `count`)^r after a stretch without samples and one with the samples of `cell`."""
        before = self.upto_top[cell - 1] if cell else 0.0
        ratio = (before - self.upto_start[some]) / (count - self.upto_start[some])
        power = ratio**r
        return (area + gap) * power + spread * (1 - power * ratio) / ((r + 1) * (1 - ratio))
