"""Sampling: what comes out of speculative decoding is distributed as the target alone would have it, whatever the drafter proposes."""

from __future__ import annotations

import numpy as np
import torch

from dflash_ray.serve.plain import generate_batch
from dflash_ray.serve.sampling import PromptRandom, accept, probabilities, sample
from dflash_ray.serve.speculative import speculative
from dflash_ray.serve.state import TargetState
from dflash_ray.target.load import load_target
from tests.serve.test_decode import prompts_of, random_drafter
from tests.support.tiny_targets import save_target


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """(statistic - degrees of freedom) / its standard deviation, cells of less than twenty expected counts joined."""
    order = np.argsort(expected)
    joined = np.cumsum(expected[order]) < 20
    few = order[joined]
    rest = order[~joined]
    observed, wanted = np.append(counts[rest], counts[few].sum()), np.append(expected[rest], expected[few].sum())
    keep = wanted > 0
    freedom = keep.sum() - 1
    return (((observed - wanted) ** 2 / np.where(keep, wanted, 1))[keep].sum() - freedom) / np.sqrt(2 * freedom)


def test_a_block_gives_the_targets_distribution_for_good_and_bad_drafters():
    rng = np.random.default_rng(0)
    target = torch.from_numpy(rng.dirichlet(np.full(8, 0.5), 3))
    for draft in (target[:2], torch.from_numpy(rng.dirichlet(np.full(8, 0.5), 2)), torch.eye(8, dtype=torch.float64)[[1, 2]]):
        rounds = 2000
        first, second = np.zeros(8), np.zeros(8)
        for number in range(rounds):
            random = PromptRandom(7, number)
            proposals = sample(draft, torch.tensor(random.draw(2))).tolist()
            accepted, extra = accept(proposals, target, draft, random)
            tokens = [*proposals[:accepted], extra]
            first[tokens[0]] += 1
            if accepted >= 1:  # the second token follows an accepted first one, and is drawn from the target's second row
                second[tokens[1]] += 1
        assert chi_square(first, rounds * target[0].numpy()) < 5
        if second.sum() > 100:
            assert chi_square(second, second.sum() * target[1].numpy()) < 5


def test_the_right_distribution_would_be_noticed_if_it_were_the_drafters():
    """The measure above can fail: counts from another distribution are far outside."""
    rng = np.random.default_rng(0)
    one, other = rng.dirichlet(np.full(8, 0.5), 2)
    assert chi_square(rng.multinomial(4000, other).astype(float), 4000 * one) > 50


@torch.inference_mode()
def test_speculative_and_plain_sampling_draw_pairs_of_tokens_with_the_targets_probabilities(tmp_path):
    save_target("qwen3_5", tmp_path, layers=4, varied=True)
    target = load_target(tmp_path, taps=[0, 2], device="cpu", with_head=True)
    [prompt] = prompts_of(6)
    temperature, rounds = 0.3, 1000
    settings = {"max_new_tokens": 2, "stop_ids": [], "temperature": temperature, "batch_size": 200}

    def distribution(ids: list[int]) -> torch.Tensor:
        return probabilities(TargetState(target, 1, 16).prefill([ids])[0][0], temperature)

    first = distribution(prompt)
    likely = [token for token in first.argsort(descending=True)[:4].tolist()]
    pairs = torch.zeros(4, target.shape.vocab_size, dtype=torch.float64)
    for row, token in enumerate(likely):
        pairs[row] = first[token] * distribution([*prompt, token])
    expected = rounds * torch.cat((pairs.flatten(), 1 - pairs.sum()[None])).numpy()
    answers = [answer.tokens for answer in speculative(target, random_drafter(target), [prompt] * rounds, **settings)]
    for tokens in (answers, generate_batch(target, [prompt] * rounds, **settings)):
        counts = np.zeros(len(expected))
        for one, two in tokens:
            counts[likely.index(one) * target.shape.vocab_size + two if one in likely else -1] += 1
        assert chi_square(counts, expected) < 5


def test_a_point_at_the_end_never_picks_a_token_without_weight():
    distribution = torch.tensor([0.25, 0.75, 0.0, 0.0], dtype=torch.float64)
    assert sample(distribution, torch.tensor(np.nextafter(1.0, 0.0))).item() == 1
    assert sample(distribution, torch.tensor(1.0)).item() == 1
    assert sample(distribution, torch.tensor(0.0)).item() == 0
    assert sample(torch.tensor([0.0, 1.0]), torch.tensor(0.0)).item() == 1
