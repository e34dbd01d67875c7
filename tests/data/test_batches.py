"""Batches: batch k is the planned samples with the anchors of (seed, epoch, sample), whoever asks and in whatever order."""

import numpy as np
import pytest

from dflash_ray.config.schema import BatchingConfig
from dflash_ray.data.anchors import anchor_candidates, choose_anchors
from dflash_ray.data.batches.plan import STRATEGIES
from dflash_ray.data.batches.source import BatchSource, plan_run, validation_batches
from dflash_ray.data.store.dataset import Sample, open_dataset
from dflash_ray.data.store.writer import write_dataset


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(0)

    def sample(number):
        tokens = int(rng.integers(5, 120))
        mask = np.zeros(tokens, np.uint8)
        mask[int(rng.integers(0, tokens - 2)) :] = 1
        return Sample(number, rng.integers(0, 1000, tokens).astype(np.int32), mask)

    folder = tmp_path_factory.mktemp("batches") / "data"
    write_dataset(folder, {"train": [sample(n) for n in range(120)], "validation": [sample(n) for n in range(40)]}, {})
    return folder


def source(folder, strategy, seed=3, epochs=2):
    dataset = open_dataset(folder)
    config = BatchingConfig(strategy=strategy, token_budget=512, lookahead=32)
    return BatchSource(dataset, plan_run(dataset, config, 10, seed, epochs), seed, 10)


def equal(one, two):
    return vars(one).keys() == vars(two).keys() and all(np.array_equal(vars(one)[name], vars(two)[name]) for name in vars(one))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_batch_is_its_documents_end_to_end(data, strategy):
    batches = source(data, strategy)
    read = open_dataset(data).read(range(120))
    for number in range(batches.run_plan.total_batches):
        batch = batches.batch(number)
        epoch, index = batches.run_plan.locate_batch(number)
        indices = batches.run_plan.epoch_plan(epoch).samples_of(index)
        assert (batch.number, batch.epoch) == (number, epoch)
        assert batch.sample_ids.tolist() == indices.tolist()
        assert batch.cu_seqlens[0] == 0 and batch.cu_seqlens[-1] == batch.tokens
        assert batch.allocated_tokens <= 512
        anchors = []
        for index, start, stop in zip(indices, batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            assert batch.input_ids[start:stop].tolist() == read[index].input_ids.tolist()
            assert batch.loss_mask[start:stop].tolist() == read[index].loss_mask.tolist()
            anchors += (choose_anchors(read[index].loss_mask, 10, 3, epoch, index) + start).tolist()
        assert batch.anchors.tolist() == anchors
        assert {name: value.dtype.name for name, value in vars(batch).items() if isinstance(value, np.ndarray)} == {
            "sample_ids": "int64",
            "input_ids": "int32",
            "cu_seqlens": "int32",
            "loss_mask": "uint8",
            "anchors": "int32",
        }


def test_any_batch_without_the_ones_before(data):
    first, second = source(data, "packed"), source(data, "packed")
    numbers = np.random.default_rng(1).permutation(first.run_plan.total_batches)
    late = {int(number): second.batch(int(number)) for number in numbers}
    assert all(equal(first.batch(number), late[number]) for number in range(first.run_plan.total_batches))
    with pytest.raises(IndexError):
        first.batch(first.run_plan.total_batches)


def test_the_plan_knows_the_largest_batch(data):
    batches = source(data, "packed")
    every = [batches.batch(number) for number in range(batches.run_plan.total_batches)]
    assert batches.run_plan.most_anchors == max(len(batch.anchors) for batch in every)
    assert batches.run_plan.most_tokens == max(batch.tokens for batch in every)
    assert batches.run_plan.most_documents == max(batch.documents for batch in every)


def test_anchors_of_a_sample_do_not_depend_on_the_strategy(data):
    def by_sample(strategy):
        out = {}
        batches = source(data, strategy)
        for number in range(batches.run_plan.total_batches):
            batch = batches.batch(number)
            for sample, start, stop in zip(batch.sample_ids, batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
                inside = (batch.anchors >= start) & (batch.anchors < stop)
                out[batch.epoch, int(sample)] = (batch.anchors[inside] - start).tolist()
        return out

    assert by_sample("packed") == by_sample("sorted") == by_sample("bucketed")
    assert by_sample("packed")[0, 7] != by_sample("packed")[1, 7]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_validation_batches_are_the_same_every_time(data, layout):
    held_out = open_dataset(data, "validation")
    config = BatchingConfig(strategy="bucketed", token_budget=256, edges=[0, 10])
    first, again = (validation_batches(held_out, config, 10, 0, 3, layout) for _ in range(2))
    assert [batch.number for batch in first] == [0, 1, 2]
    assert all(equal(one, two) for one, two in zip(first, again, strict=True))
    whole = validation_batches(held_out, config, 10, 0, 1000, layout)
    assert sorted(np.concatenate([batch.sample_ids for batch in whole])) == list(range(40))
    for batch in whole:
        assert batch.layout == layout and batch.allocated_tokens <= 256
        for start, stop in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            inside = batch.anchors[(batch.anchors >= start) & (batch.anchors < stop)] - start
            assert len(inside) and np.isin(inside, anchor_candidates(batch.loss_mask[start:stop])).all()
