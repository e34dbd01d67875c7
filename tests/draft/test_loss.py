"""Labels, weights, losses and the numbers that are reported."""

import math

import numpy as np
import pytest
import torch

from dflash_ray.config.schema import LossConfig
from dflash_ray.draft.blocks.labels import Labels, decay_gamma, dpace_weights
from dflash_ray.draft.loss import block_losses, step_metrics
from tests.support.draft_cases import VOCAB, random, small_batch


def labelled(batch, block_size=4, gamma=4.0):
    return Labels.of(batch, block_size, gamma)


def test_slot_0_has_no_label_and_slot_1_has_full_weight():
    labels = labelled(small_batch((12,), (2,)), block_size=8)
    assert (labels.slots % 8).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert labels.decay.tolist() == pytest.approx([1, *(math.exp(-k / 4) for k in range(1, 7))])
    assert labels.tokens.tolist() == small_batch((12,), (2,)).input_ids[3:10].tolist()


@pytest.mark.parametrize(("block_size", "gamma"), [(8, 4), (10, 5), (16, 7), (4, 2), (13, 6)])
def test_default_gamma(block_size, gamma):
    assert decay_gamma(LossConfig(), block_size) == pytest.approx(gamma)
    assert decay_gamma(LossConfig(gamma=9.5), block_size) == 9.5


def test_the_next_document_is_never_a_label():
    """Anchors at every position of fully supervised documents, the case where a whole-row bound would leak."""
    lengths = (5, 2, 1, 9)
    batch = small_batch(lengths, tuple(range(sum(lengths))))
    labels = labelled(batch)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    anchor = labels.slots.numpy() // 4
    assert (owner[labels.positions + 1] == owner[batch.anchors[anchor]]).all()
    assert labels.count == sum(min(3, end - place - 1) for end, place in zip(np.cumsum(lengths)[owner], range(sum(lengths)), strict=True))


def test_counts_say_what_is_covered():
    batch = small_batch((8, 4), (1, 2, 9), unsupervised=(0, 4, 7))
    labels = labelled(batch)
    # anchor 1: 2, 3 and not 4; anchor 2: 3, 5; anchor 9: 10, 11 and then the document ends
    assert labels.counts["labels"] == 6 and labels.counts["anchors"] == 3 and labels.counts["blocks"] == 0
    assert labels.counts["supervised"] == 9 and labels.counts["covered"] == 5
    assert [labels.counts[f"slot_labels.{k}"] for k in (1, 2, 3)] == [3, 2, 1]


def certain(batch, labels, guesses):
    """Output rows that make an identity head say `guesses`, with equal confidence."""
    return 9.0 * torch.eye(VOCAB, dtype=torch.float64)[torch.as_tensor(guesses)]


def test_tau_counts_leading_matches_of_complete_blocks():
    batch = small_batch((12, 3), (0, 3, 6, 12))
    labels = labelled(batch)
    wrong = {(0, 2), (1, 1), (3, 1)}  # block 3 stands at the end of its document and has no third label
    guesses = [
        (token + 1) % VOCAB if (row // 4, row % 4) in wrong else token
        for row, token in zip(labels.slots.tolist(), labels.tokens.tolist(), strict=True)
    ]
    head = torch.eye(VOCAB, dtype=torch.float64)
    sums = block_losses(certain(batch, labels, guesses), head, labels, LossConfig(), chunk=4).sums
    metrics = step_metrics(sums, LossConfig(), 4)
    assert metrics["tau"] == pytest.approx(((1 + 1) + (0 + 1) + (3 + 1)) / 3)
    assert metrics["tau_blocks"] == 3 / 4
    assert metrics["accuracy"] == pytest.approx(8 / 11)
    assert metrics["slot_accuracy"] == pytest.approx([2 / 4, 3 / 4, 3 / 3])


def uniform_confidence(q, block_size=16):
    labels = labelled(small_batch((block_size,), (0,)), block_size)
    log_q = torch.full((block_size - 1,), math.log(q), dtype=torch.float64)
    return labels, log_q


def test_dpace_rises_while_the_drafter_improves_and_tau_does_not_fall():
    """Published numbers of the same loss, per slot: 0.40 at q = 0.2 and 0.65 at q = 0.8. So no checkpoint is chosen by it."""
    values = {}
    for q in (0.2, 0.8):
        labels, log_q = uniform_confidence(q)
        values[q] = -(dpace_weights(log_q, labels, 0.5) * log_q).sum().item() / 15
    assert values[0.2] == pytest.approx(0.40, abs=0.005)
    assert values[0.8] == pytest.approx(0.65, abs=0.005)


def test_dpace_treats_a_hole_as_factor_one_and_no_term():
    labels = labelled(small_batch((9,), (0,), unsupervised=(2,)), block_size=5)
    s = [0.5 * q + 0.5 for q in (0.3, 0.6, 0.9)]  # slots 1, 3, 4
    prefix = [s[0], s[0] * s[1], s[0] * s[1] * s[2]]
    weights = dpace_weights(torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64).log(), labels, 0.5)
    assert weights.tolist() == pytest.approx([sum(prefix), prefix[1] + prefix[2], prefix[2]])


@pytest.mark.parametrize("config", [LossConfig(), LossConfig(ce=0.5, kl=0.3, tv=0.2, dpace=1)], ids=["dpace", "mixture"])
def test_the_number_of_chunks_does_not_matter(config):
    batch = small_batch((30,), tuple(range(0, 28, 2)))
    labels = labelled(batch)
    rows, head = random(labels.count, 12), random(VOCAB, 12, seed=1)
    teacher = random(labels.count, 12, seed=2) if config.needs_teacher else None
    whole = block_losses(rows, head, labels, config, 1000, teacher)
    for chunk in (1, 7, labels.count):
        cut = block_losses(rows, head, labels, config, chunk, teacher)
        assert cut.sums == pytest.approx(whole.sums, rel=1e-12)
        for kind, gradient in whole.gradients.items():
            torch.testing.assert_close(cut.gradients[kind], gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_at_the_real_vocabulary_match_float64(dtype):
    """V = 248,320; inputs in `dtype`, softmax in float32, against everything in float64 on the same inputs."""
    vocabulary, width = 248_320, 64
    batch = small_batch((20,), (0, 4, 8, 12))
    labels = labelled(batch)
    rows, head = random(labels.count, width, dtype=dtype), (random(vocabulary, width, seed=1) / 4).to(dtype)
    teacher = random(labels.count, width, seed=2, dtype=dtype)
    config = LossConfig(ce=1, dpace=1, kl=1, tv=1, dpace_kl=1)
    ours = block_losses(rows, head, labels, config, 5, teacher).sums
    logits, wanted = (part.double() @ head.double().T for part in (rows, teacher))
    log_p, log_t = logits.log_softmax(1), wanted.log_softmax(1)
    log_q = log_p[torch.arange(labels.count), labels.tokens]
    divergence = (log_t.exp() * (log_t - log_p)).sum(1)
    exact = {
        "ce": -(labels.decay * log_q).sum(),
        "dpace": -(dpace_weights(log_q, labels, 0.5) * log_q).sum(),
        "kl": (labels.decay * divergence).sum(),
        "tv": (labels.decay * (log_p.exp() - log_t.exp()).abs().sum(1) / 2).sum(),
        "dpace_kl": (dpace_weights(log_q, labels, 0.5) * divergence).sum(),
    }
    for name, value in exact.items():
        assert ours[name] == pytest.approx(value.item(), rel=1e-3), name
    metrics = step_metrics(ours, config, 4)
    assert metrics["loss"] == pytest.approx(sum(metrics[name] for name in exact))


def test_no_label_no_division():
    labels = labelled(small_batch((6,), (1,), unsupervised=range(6)))
    metrics = step_metrics(
        dict.fromkeys(("ce", "dpace", "kl", "tv", "dpace_kl", "correct", "tau"), 0.0) | labels.counts | SLOTS, LossConfig(), 4
    )
    assert metrics["loss"] == metrics["tau"] == metrics["accuracy"] == 0.0


SLOTS = {f"slot_correct.{k}": 0.0 for k in (1, 2, 3)}
