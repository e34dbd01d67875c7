"""Plans: every sample once, budgets kept, the same for ever, different every epoch, and batches as full and as even as promised."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ray.config.schema import BatchingConfig
from dflash_ray.data.batches.plan import STRATEGIES, RunPlan, make_plan, resolve_edges, resolve_strategy
from dflash_ray.data.batches.report import batching_report, composition_change, shuffle_bias, target_seconds
from dflash_ray.random_streams import shuffled, stream


@st.composite
def settings_and_lengths(draw):
    lengths = draw(st.lists(st.integers(1, 120), min_size=1, max_size=150))
    config = BatchingConfig(
        strategy=draw(st.sampled_from(STRATEGIES)),
        token_budget=draw(st.integers(max(lengths), 600)),
        max_rows=draw(st.integers(1, 20)),
        buckets=draw(st.integers(1, 5)),
        lookahead=draw(st.integers(2, 60)),
        grid=draw(st.sampled_from([1, 8, 32])),
    )
    lengths = np.array(lengths)
    return lengths, np.minimum(lengths - 1, np.maximum(1, lengths // draw(st.integers(1, 50)))), config


def batches_of(plan):
    return [plan.samples[low:high].tolist() for low, high in zip(plan.offsets[:-1], plan.offsets[1:], strict=True)]


def found_in(run, number):
    """(epoch, samples) of a batch of the run."""
    epoch, index = run.locate_batch(number)
    return epoch, run.epoch_plan(epoch).samples_of(index)


@settings(max_examples=200, deadline=None)
@given(settings_and_lengths(), st.integers(0, 2**31 - 1), st.integers(0, 5))
def test_each_sample_exactly_once_and_budgets_kept(given, seed, epoch):
    lengths, anchors, config = given
    plan = make_plan(lengths, anchors, config, seed, epoch)
    batches = batches_of(plan)
    assert sorted(sum(batches, [])) == list(range(len(lengths)))
    assert all(batches) and len(batches) == plan.batches
    for batch, allocated in zip(batches, plan.allocated(lengths), strict=True):
        if config.strategy == "packed":
            assert allocated == sum(lengths[batch]) <= config.token_budget
        else:
            assert allocated == max(lengths[batch]) * len(batch) <= config.token_budget
            assert len(batch) <= config.max_rows
    assert plan.layout == ("packed" if config.strategy == "packed" else "padded")


@settings(max_examples=40, deadline=None)
@given(settings_and_lengths(), st.integers(0, 1000), st.integers(1, 4), st.data())
def test_any_batch_of_a_run_is_found_without_the_ones_before(given, seed, epochs, data):
    """Resume from any k: two plans of the same run agree on every batch, in whatever order they are asked."""
    lengths, anchors, config = given
    run, again = (RunPlan(lengths, anchors, config, seed, epochs) for _ in range(2))
    assert run.fingerprint == again.fingerprint and run.total_batches == again.total_batches
    whole = [found_in(run, number) for number in range(run.total_batches)]
    for number in data.draw(st.permutations(range(run.total_batches))):
        epoch, samples = found_in(again, number)
        assert epoch == whole[number][0] and samples.tolist() == whole[number][1].tolist()
    for epoch in range(epochs):
        assert sorted(np.concatenate([s for e, s in whole if e == epoch])) == list(range(len(lengths)))
    assert [epoch for epoch, _ in whole] == sorted(epoch for epoch, _ in whole)
    assert run.tokens == epochs * lengths.sum()
    assert run.most_anchors == max(anchors[samples].sum() for _, samples in whole)
    assert run.most_tokens == max(lengths[samples].sum() for _, samples in whole)
    with pytest.raises(IndexError):
        run.locate_batch(run.total_batches)


@pytest.fixture(scope="module")
def realistic():
    """30,000 documents: log-normal lengths cut at 8,192, and as many supervised tokens as a share of the document that varies widely."""
    rng = np.random.default_rng(3)
    lengths = np.clip(np.rint(rng.lognormal(7.37, 0.76, 30_000)), 16, 8192).astype(np.int64)
    return lengths, np.maximum(1, (lengths * rng.uniform(0.1, 1, len(lengths))).astype(np.int64) - 1)


def test_fingerprint_tells_runs_apart(realistic):
    lengths, anchors = realistic[0][:500], realistic[1][:500]
    config = BatchingConfig(strategy="packed")
    runs = [
        RunPlan(lengths, anchors, config, 0, 2),
        RunPlan(lengths, anchors, config, 1, 2),
        RunPlan(lengths, anchors, config, 0, 3),
        RunPlan(lengths[::-1], anchors[::-1], config, 0, 2),
        RunPlan(lengths, anchors, config.model_copy(update={"token_budget": 20_000}), 0, 2),
        RunPlan(lengths, anchors, config.model_copy(update={"strategy": "bucketed"}), 0, 2),
    ]
    assert len({run.fingerprint for run in runs}) == len(runs)


def test_steps_run_over_epoch_ends(realistic):
    run = RunPlan(realistic[0][:300], realistic[1][:300], BatchingConfig(strategy="packed"), 0, 3)
    assert run.steps(1) == run.total_batches
    assert run.steps(7) == -(-run.total_batches // 7)


@pytest.mark.parametrize("strategy", ["random", "bucketed", "packed"])
def test_epochs_and_seeds_differ(realistic, strategy):
    config = BatchingConfig(strategy=strategy)
    first, second = (make_plan(*realistic, config, 0, epoch) for epoch in (0, 1))
    other = make_plan(*realistic, config, 1, 0)
    assert composition_change(first, second) > 0.99
    assert composition_change(first, other) > 0.99
    assert composition_change(first, first) == 0


def test_sorted_is_static_and_needs_next_to_no_padding(realistic):
    config = BatchingConfig(strategy="sorted")
    first, second = (make_plan(*realistic, config, seed, epoch) for seed, epoch in ((0, 0), (5, 3)))
    assert first.samples.tolist() == second.samples.tolist() and first.offsets.tolist() == second.offsets.tolist()
    assert (np.diff(realistic[0][first.samples]) >= 0).all()
    assert realistic[0].sum() / first.allocated(realistic[0]).sum() > 0.995


def test_random_is_the_shuffle_cut_by_the_longest_so_far():
    """The rule as one would say it; the newest document's length alone gives other batches on [9, 1, 1, 1]."""
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    config = BatchingConfig(strategy="random", token_budget=300, max_rows=5)
    plan = make_plan(lengths, lengths, config, 4, 2)
    assert plan.samples.tolist() == shuffled(500, stream("plan", 4, 2)).tolist()
    expected, batch = [], []
    for sample in plan.samples.tolist():
        if batch and (len(batch) == 5 or max(lengths[[*batch, sample]]) * (len(batch) + 1) > 300):
            expected.append(batch)
            batch = []
        batch.append(sample)
    assert batches_of(plan) == [*expected, batch]


def test_bucketed_keeps_to_its_buckets_and_mixes_them(realistic):
    lengths, anchors = realistic
    config = BatchingConfig(strategy="bucketed", edges=[0, 770, 1216, 1728, 2432, 3296, 8192], token_budget=65536)
    plan = make_plan(lengths, anchors, config, 0, 0)
    for batch, bucket in zip(batches_of(plan), plan.buckets, strict=True):
        assert config.edges[bucket] < min(lengths[batch]) and max(lengths[batch]) <= config.edges[bucket + 1]
    # in a random order of batches, neighbours share a bucket as often as any two batches do
    share = np.bincount(plan.buckets) / plan.batches
    same = (plan.buckets[1:] == plan.buckets[:-1]).mean()
    assert abs(same - (share**2).sum()) < 4 * np.sqrt(same / plan.batches)


def test_an_edge_belongs_to_the_bucket_below_it():
    lengths = np.array([10, 11, 20])
    config = BatchingConfig(strategy="bucketed", edges=[0, 10, 20], token_budget=100)
    plan = make_plan(lengths, lengths, config, 0, 0)
    assert sorted(zip(plan.buckets.tolist(), map(sorted, batches_of(plan)), strict=True)) == [(0, [0]), (1, [1, 2])]


@pytest.mark.parametrize("budget", [16384, 32768, 65536])
def test_packed_fills_the_budget_and_stays_near_a_uniform_shuffle(realistic, budget):
    lengths, anchors = realistic
    config = BatchingConfig(strategy="packed", token_budget=budget)
    plan = make_plan(lengths, anchors, config, 0, 0)
    assert lengths.sum() / (plan.batches * budget) > 0.99
    place = np.argsort(shuffled(len(lengths), stream("plan", 0, 0)))
    moved = np.arange(len(lengths)) - place[plan.samples]
    assert np.abs(moved).max() < config.lookahead
    bias = shuffle_bias(plan, lengths, 0)
    assert bias["max_displacement"] == np.abs(moved).max()
    assert abs(bias["length_correlation"]) < 0.15
    assert abs(bias["shortest_tenth"]) < config.lookahead / 4 and abs(bias["longest_tenth"]) < config.lookahead / 4
    assert bias["drift"] < 4.5  # a hundred parts of a uniform shuffle stay below this in all but one of a thousand epochs


def test_packed_evens_out_anchors(realistic):
    """Anchors as dense as the mask, the worst case: shares of 0.1 to 1. A plain shuffle has three times the spread."""
    lengths, anchors = realistic
    packed = make_plan(lengths, anchors, BatchingConfig(strategy="packed"), 0, 0).sums(anchors)[:-1]
    samples = shuffled(len(lengths), stream("plan", 0, 0))
    plain = np.add.reduceat(anchors[samples], np.searchsorted(np.cumsum(lengths[samples]), np.arange(0, lengths.sum(), 16384)))[:-1]
    assert packed.std() / packed.mean() < 0.35 * plain.std() / plain.mean()
    assert np.quantile(packed, 0.99) < 1.3 * packed.mean()
    usual = np.minimum(anchors, np.maximum(1, lengths // 43))
    usual = make_plan(lengths, usual, BatchingConfig(strategy="packed"), 0, 0).sums(usual)[:-1]
    assert usual.std() / usual.mean() < 0.01


def test_max_rows_does_not_bound_packed_batches():
    lengths = np.full(1000, 10)
    plan = make_plan(lengths, lengths, BatchingConfig(strategy="packed", token_budget=5000, max_rows=2), 0, 0)
    assert plan.documents.tolist() == [500, 500]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sample_over_the_budget_is_refused_with_its_length_and_the_key(strategy):
    lengths = np.array([5, 101, 7, 150])
    with pytest.raises(ValueError, match=r"sample 1 has 101 tokens.*batching\.token_budget 100.*150"):
        make_plan(lengths, lengths, BatchingConfig(strategy=strategy, token_budget=100), 0, 0)


@pytest.mark.parametrize(
    "edges, words", [([0], "ascending"), ([5, 10], "start with 0"), ([0, 10, 10], "ascending"), ([0, 9], "below the longest sample, 10")]
)
def test_edges_that_cannot_be(edges, words):
    with pytest.raises(ValueError, match=words):
        resolve_edges(np.array([10]), BatchingConfig(edges=edges))


def test_auto_strategy_follows_the_target_and_says_so():
    assert resolve_strategy(BatchingConfig(), True)[0] == "packed"
    assert resolve_strategy(BatchingConfig(), False)[0] == "bucketed"
    assert "does not isolate" in resolve_strategy(BatchingConfig(), False)[1]
    assert resolve_strategy(BatchingConfig(strategy="random"), True)[0] == "random"
    with pytest.raises(ValueError, match="batching.strategy packed"):
        resolve_strategy(BatchingConfig(strategy="packed"), False)


@pytest.mark.parametrize("lengths", [[1], [8], [4] * 7, [8, 1], [8] * 100])
@pytest.mark.parametrize("budget", [8, 100])
def test_reports_of_tiny_inputs(lengths, budget):
    report = batching_report(np.array(lengths), np.ones(len(lengths)), BatchingConfig(token_budget=budget), 0)
    assert set(report["strategies"]) == set(STRATEGIES)
    for figures in report["strategies"].values():
        assert 0 < figures["padding_efficiency"] <= 1 and figures["batches"] >= 1


def test_target_time_reads_the_speed_table_between_and_beyond_its_entries():
    lengths = np.array([100, 200, 150, 400])
    plan = make_plan(lengths, lengths, BatchingConfig(strategy="sorted", token_budget=400, max_rows=1), 0, 0)
    assert target_seconds(plan, lengths, {100: 10.0, 200: 20.0}) == pytest.approx(100 / 10 + 150 / 15 + 200 / 20 + 400 / 20)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [16384, 65536])
def test_plans_of_902_087_lengths_hold_every_sample_once(budget):
    from dflash_ray.data.batches.edges import best_edges

    lengths = np.clip(np.rint(np.random.default_rng(0).lognormal(7.37, 0.76, 902_087)), 16, 8192).astype(np.int64)
    edges = best_edges(lengths, 6, budget, 64).edges
    for strategy in STRATEGIES:
        plan = make_plan(lengths, lengths // 43, BatchingConfig(strategy=strategy, token_budget=budget, edges=edges), 0, 0)
        assert 0 < lengths.sum() / plan.allocated(lengths).sum() <= 1
        assert np.array_equal(np.sort(plan.samples), np.arange(len(lengths))), strategy
