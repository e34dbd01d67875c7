"""Bucket edges: the cost is what the packing rule really needs, and no other edges are cheaper."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ray.data.batches.edges import MAX_CELLS, allocation_table, best_edges, expected_tokens


def padded_tokens(lengths, budget, max_rows):
    """Tokens allocated when documents in this order are cut into batches."""
    allocated = rows = longest = 0
    for length in lengths:
        if rows == max_rows or max(longest, length) * (rows + 1) > budget:
            allocated += longest * rows
            rows = longest = 0
        rows, longest = rows + 1, max(longest, length)
    return allocated + longest * rows


def realised(lengths, edges, budget, max_rows, seed=0):
    """Padding efficiency of a shuffled, bucketed epoch."""
    shuffled = np.random.default_rng(seed).permutation(lengths)
    parts = [shuffled[(shuffled > low) & (shuffled <= high)].tolist() for low, high in itertools.pairwise(edges)]
    return int(lengths.sum()) / sum(padded_tokens(part, budget, max_rows) for part in parts)


def cost_by_chain(lengths, budget, max_rows):
    """Expected tokens per sample in the long run: the Markov chain over (first document of a batch), every state spelled out."""
    values, counts = np.unique(lengths, return_counts=True)
    chance = counts / counts.sum()
    follow = np.zeros((len(values), len(values)))  # first document of a batch -> first document of the next one
    rows, tokens = np.zeros(len(values)), np.zeros(len(values))
    for first in range(len(values)):
        longest_now = {first: 1.0}  # index of the longest so far -> probability, for batches of r rows
        for r in range(1, max_rows + 1):
            longest_next = {}
            for (longest, probability), new in itertools.product(longest_now.items(), range(len(values))):
                p = probability * chance[new]
                if r == max_rows or values[max(longest, new)] * (r + 1) > budget:
                    follow[first, new] += p
                    rows[first] += p * r
                    tokens[first] += p * r * values[longest]
                else:
                    longest_next[max(longest, new)] = longest_next.get(max(longest, new), 0.0) + p
            longest_now = longest_next
    start = np.linalg.matrix_power((follow + np.eye(len(values))) / 2, 1 << 20)[0]  # half a step, so that no cycle is left
    return float(start @ tokens / (start @ rows))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(30, 90), st.integers(1, 6))
def test_cost_is_that_of_the_chain_of_batches(lengths, budget, max_rows):
    lengths = np.sort(np.array(lengths))
    cost = allocation_table(lengths, np.unique(lengths), budget, max_rows, starts=1)[0, -1]
    assert cost == pytest.approx(len(lengths) * cost_by_chain(lengths, budget, max_rows), rel=1e-9)


def expected_efficiency(lengths, found):
    return np.sum(lengths, dtype=np.int64) / found.expected_tokens


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 4), st.integers(40, 200), st.integers(1, 8))
def test_no_other_edges_are_cheaper(lengths, buckets, budget, max_rows):
    """Brute force over all ways to choose the edges, each bucket's cost worked out on its own."""
    lengths = np.sort(np.array(lengths))
    tops = np.unique(lengths)
    found = best_edges(lengths, buckets, budget, max_rows, grid=1)
    table = allocation_table(lengths, tops, budget, max_rows)
    cheapest = min(
        sum(table[first, last - 1] for first, last in itertools.pairwise([0, *cut, len(tops)]))
        for size in range(min(buckets, len(tops)))
        for cut in itertools.combinations(range(1, len(tops)), size)
    )
    assert found.expected_tokens == pytest.approx(cheapest, rel=1e-12)
    assert found.edges[0] == 0 and found.edges[-1] == lengths[-1] and len(found.edges) <= buckets + 1
    # the search leaves out what hardly counts; the full sum of the edges it found is the same number
    assert expected_tokens(lengths, found.edges, budget, max_rows).sum() == pytest.approx(found.expected_tokens, rel=0.02)


def distributions(count=10_000):
    rng = np.random.default_rng(5)
    humps = np.where(rng.random(count) < 0.5, rng.normal(300, 60, count), rng.normal(6000, 800, count))
    kinds = {
        "uniform": rng.integers(1, 8193, count),
        "log-normal": rng.lognormal(7.3, 0.8, count),
        "two humps": humps,
        "geometric": rng.geometric(1 / 800, count),
        "heavy tail": 200 * (rng.pareto(1.1, count) + 1),
        "narrow": rng.integers(2000, 2100, count),
        "many at the cap": rng.lognormal(8, 1, count),
        "a few values": rng.choice([64, 512, 1000, 2048, 4096, 8192], count),
    }
    return {name: np.clip(np.rint(lengths), 1, 8192).astype(np.int64) for name, lengths in kinds.items()}


def coordinate_descent(lengths, buckets, budget, max_rows):
    """Local search from a geometric start on what packing really gives (one shuffle), one edge at a time by ever smaller steps."""
    shuffled = np.random.default_rng(1).permutation(lengths)
    known = {}

    def tokens(edges):
        for low, high in itertools.pairwise(edges):
            if (low, high) not in known:
                known[low, high] = padded_tokens(shuffled[(shuffled > low) & (shuffled <= high)].tolist(), budget, max_rows)
        return sum(known[pair] for pair in itertools.pairwise(edges))

    start = np.geomspace(max(int(lengths.min()), 1), int(lengths.max()), buckets + 1)[1:]
    edges, step = [0, *np.unique(np.rint(start).astype(int)).tolist()], 512
    while step >= 32:
        before = tokens(edges)
        for at in range(1, len(edges) - 1):
            tries = [[*edges[:at], edges[at] + move, *edges[at + 1 :]] for move in (-step, 0, step)]
            edges = min((tried for tried in tries if tried[at - 1] < tried[at] < tried[at + 1]), key=tokens)
        if tokens(edges) == before:
            step //= 2
    return edges


cases = [pytest.param(name, budget, marks=[pytest.mark.slow] * (budget == 8192)) for name in distributions() for budget in (8192, 65536)]


@pytest.mark.parametrize("name, budget", cases)
def test_never_worse_than_coordinate_descent_and_packing_gives_what_was_expected(name, budget):
    lengths = distributions()[name]
    found = best_edges(lengths, 6, budget, 64)
    ours = realised(lengths, found.edges, budget, 64)
    theirs = realised(lengths, coordinate_descent(lengths, 6, budget, 64), budget, 64)
    assert ours >= theirs - 0.001
    assert expected_efficiency(lengths, found) == pytest.approx(ours, abs=0.005)


@pytest.mark.parametrize("edges", [[0, 8192], [0, 100, 8192], [0, 770, 1216, 1728, 2432, 3296, 8192], [0, 8000, 8192]])
@pytest.mark.parametrize("max_rows", [4, 64])
def test_given_edges_are_judged_by_the_same_rule(edges, max_rows):
    lengths = distributions()["log-normal"]
    expected = lengths.sum() / expected_tokens(lengths, edges, 16384, max_rows).sum()
    assert expected == pytest.approx(realised(lengths, edges, 16384, max_rows), abs=0.005)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_a_length_that_many_samples_share_is_counted_as_it_is(share):
    """Spread over its cell of the grid, such a length once looked 3 points cheaper than it was."""
    rng = np.random.default_rng(3)
    lengths = np.where(rng.random(60_000) < share, 50, rng.integers(1, 400, 60_000))
    found = best_edges(lengths, 3, 16384, 8)
    assert expected_efficiency(lengths, found) == pytest.approx(realised(lengths, found.edges, 16384, 8), abs=0.003)
    expected = lengths.sum() / expected_tokens(lengths, found.edges, 16384, 8).sum()
    assert expected == pytest.approx(realised(lengths, found.edges, 16384, 8), abs=0.003)


def test_totals_beyond_32_bits():
    """902,087 samples of 1.87e9 tokens once came out with a negative efficiency."""
    lengths = np.clip(np.rint(np.random.default_rng(0).lognormal(7.37, 0.76, 902_087)), 16, 8192).astype(np.int32)
    assert lengths.sum(dtype=np.int64) > 1.8e9
    found = best_edges(lengths, 6, 65536, 64)
    assert 0.7 < expected_efficiency(lengths, found) < 1
    assert found.expected_tokens > 2**31
    assert lengths.sum(dtype=np.int64) / expected_tokens(lengths, found.edges, 65536, 64).sum() == pytest.approx(
        expected_efficiency(lengths, found), abs=1e-3
    )


@pytest.mark.parametrize("lengths", [[1], [7] * 5, [3, 3, 9], [65536], [1, 65536]])
@pytest.mark.parametrize("buckets", [1, 2, 6])
def test_tiny_inputs(lengths, buckets):
    found = best_edges(np.array(lengths), buckets, 65536, 64)
    assert found.edges[0] == 0 and found.edges[-1] == max(lengths)
    assert 0 < expected_efficiency(lengths, found) <= 1


def test_a_grid_too_fine_is_coarsened():
    lengths = np.arange(1, 100_001)
    found = best_edges(lengths, 3, 100_000, 8, grid=1)
    assert found.grid > 1 and 100_000 / found.grid <= MAX_CELLS
