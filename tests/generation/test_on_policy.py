"""The share of the target's own text, judged by decoding every token anew."""

from __future__ import annotations

import numpy as np

from dflash_ray.data.store.dataset import Sample, open_dataset
from dflash_ray.data.store.writer import DatasetWriter
from dflash_ray.generation.on_policy import agreement, on_policy
from dflash_ray.serve.plain import plain_greedy
from dflash_ray.target.load import load_target


def test_own_answers_have_share_1_and_strange_ones_the_share_they_have(folder):
    target = load_target(folder, taps=None, device="cpu", with_head=True)
    prompt = [2, 3, 7, 9]
    answer = plain_greedy(target, prompt, 20, (1,))
    ids = np.array(prompt + answer, np.int32)
    mask = (np.arange(len(ids)) >= len(prompt)).astype(np.uint8)
    own = agreement(target, Sample(0, ids, mask))
    assert (own.tokens, own.agree) == (len(answer), len(answer))
    strange = np.random.default_rng(0).integers(3, 128, 40).astype(np.int32)
    mask = (np.arange(40) % 3 > 0).astype(np.uint8)
    measured = agreement(target, Sample(0, strange, mask))
    expected = 0
    for place in np.flatnonzero(mask[1:]) + 1:
        expected += plain_greedy(target, strange[:place].tolist(), 1, ())[0] == strange[place]
    assert (measured.tokens, measured.agree) == (int(mask[1:].sum()), expected)


def test_samples_with_and_without_reasoning_are_told_apart(tmp_path, folder):
    target = load_target(folder, taps=None, device="cpu", with_head=True)
    with DatasetWriter(tmp_path / "data") as writer:
        for index in range(12):
            ids = [2, 3, 5 if index % 3 == 0 else 6, 9 + index, 7, 7, 8]
            writer.add("train", ids, [0, 0, int(index != 3), 1, 1, 1, 1])  # 5 ends a think block; in sample 3 the prompt closed it
        writer.finish({})
    measured = on_policy(target, open_dataset(tmp_path / "data"), think_end=5)
    assert (measured["with_thinking"]["samples"], measured["without_thinking"]["samples"]) == (3, 9)
    assert on_policy(target, open_dataset(tmp_path / "data"), None, samples=4)["without_thinking"]["samples"] == 4
