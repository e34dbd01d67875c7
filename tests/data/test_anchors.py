"""Anchors: candidates are supervised pairs, the count follows the rule, the choice follows (seed, epoch, sample) and nothing else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ray.data.anchors import anchor_candidates, anchor_count, choose_anchors, fixed_anchors

masks = st.lists(st.integers(0, 1), min_size=1, max_size=200).map(lambda bits: np.array(bits, np.uint8))


@given(masks)
def test_candidates_are_the_positions_supervised_with_their_next(mask):
    slow = [i for i in range(len(mask) - 1) if mask[i] == 1 and mask[i + 1] == 1]
    assert anchor_candidates(mask).tolist() == slow


@pytest.mark.parametrize(
    "tokens, candidates, per_anchor, count",
    [
        (1, 0, 43, 0),
        (2, 1, 43, 1),
        (60, 59, 43, 1),
        (86, 85, 43, 2),
        (430, 3, 43, 3),
        (430, 429, 43, 10),
        (10, 9, 0.001, 9),
        (10, 9, 1e9, 1),
    ],
)
def test_count_is_one_per_so_many_tokens_at_least_one_at_most_the_candidates(tokens, candidates, per_anchor, count):
    assert anchor_count(np.array([tokens]), np.array([candidates]), per_anchor).tolist() == [count]


@given(masks, st.floats(0.5, 100), st.integers(0, 2**31 - 1), st.integers(0, 99), st.integers(0, 2**40))
def test_choice_is_ascending_candidates_of_the_planned_number_and_repeatable(mask, per_anchor, seed, epoch, sample_id):
    chosen = choose_anchors(mask, per_anchor, seed, epoch, sample_id)
    candidates = anchor_candidates(mask)
    assert chosen.dtype == np.int32
    assert (np.diff(chosen) > 0).all() and np.isin(chosen, candidates).all()
    assert len(chosen) == anchor_count(len(mask), len(candidates), per_anchor)
    assert choose_anchors(mask, per_anchor, seed, epoch, sample_id).tolist() == chosen.tolist()


def test_choice_changes_with_seed_epoch_and_sample_but_validation_choice_with_no_epoch():
    mask = np.ones(1000, np.uint8)
    draws = [choose_anchors(mask, 10, *key).tolist() for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]]
    assert len({tuple(draw) for draw in draws}) == 4
    assert fixed_anchors(mask, 10, 0, 5).tolist() == fixed_anchors(mask, 10, 0, 5).tolist() != fixed_anchors(mask, 10, 0, 6).tolist()


def test_every_candidate_is_equally_likely():
    mask = np.zeros(60, np.uint8)
    mask[10:41] = 1  # 30 candidates, 6 of them chosen
    hits = np.zeros(60)
    for epoch in range(3000):
        hits[choose_anchors(mask, 10, 0, epoch, 7)] += 1
    assert hits[:10].sum() == hits[40:].sum() == 0
    expected, deviation = 3000 * 6 / 30, np.sqrt(3000 * 0.2 * 0.8)
    assert (np.abs(hits[10:40] - expected) < 5 * deviation).all()


def test_the_choice_is_the_same_words_for_ever():
    """A resumed run must draw what the first one drew, with whatever numpy is installed by then."""
    assert choose_anchors(np.ones(400, np.uint8), 43, 1, 2, 3).tolist() == [7, 37, 97, 134, 246, 295, 346, 348, 398]
