"""The training forward equals a server that runs block by block and slot by slot; so do losses and their gradients."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ray.config.schema import LossConfig
from dflash_ray.draft.blocks.labels import Labels
from dflash_ray.draft.blocks.mask import Blocks
from dflash_ray.draft.dflash.shape import FULL, SLIDING
from dflash_ray.draft.loss import ANCHORS, WEIGHT, block_losses
from tests.support.draft_cases import VOCAB, features_for, random, small_batch, small_model, small_shape, small_trainer
from tests.support.draft_oracle import all_outputs, losses


@st.composite
def cases(draw):
    """A shape and a batch: any windows, block sizes, anchors one token apart, blocks past a document's end, holes in the supervision."""
    kinds = draw(st.lists(st.sampled_from([FULL, SLIDING]), min_size=1, max_size=2))
    shape = small_shape(
        layer_types=tuple(kinds),
        num_layers=len(kinds),
        sliding_window=draw(st.integers(1, 9)),
        block_size=draw(st.integers(2, 6)),
        kv_heads=draw(st.sampled_from([1, 2, 4])),
    )
    lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))
    places = st.sets(st.integers(0, sum(lengths) - 1), min_size=1, max_size=4)
    return shape, small_batch(lengths, sorted(draw(places)), seed=draw(st.integers(0, 99)), unsupervised=draw(places))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(cases())
def test_training_forward_is_serving_slot_by_slot(case):
    shape, batch = case
    model, features, embed = small_model(shape), random(batch.tokens, shape.features), random(VOCAB, shape.hidden, seed=1)
    ours = model(features, Blocks.of(batch, shape.block_size), embed)
    slow = all_outputs(dict(model.named_parameters()), shape, batch, features, embed)
    torch.testing.assert_close(ours, torch.stack([torch.stack(block) for block in slow]), rtol=1e-9, atol=1e-9)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(cases(), st.integers(0, 3))
def test_serving_interface_is_serving_slot_by_slot(case, stale):
    """Also with `stale` entries at and after the anchor still in the cache."""
    shape, batch = case
    model, features, embed = small_model(shape), random(batch.tokens, shape.features), random(VOCAB, shape.hidden, seed=1)
    slow = all_outputs(dict(model.named_parameters()), shape, batch, features, embed)
    for anchor, expected in zip(batch.anchors.tolist(), slow, strict=True):
        start = int(batch.cu_seqlens[np.searchsorted(batch.cu_seqlens, anchor, side="right") - 1])
        seen = features[start : anchor + stale]
        cache = model.context_kv(model.context(seen), torch.arange(len(seen)))
        block = model.block_embeddings(torch.tensor(int(batch.input_ids[anchor])), embed)
        ours = model.forward_block(block, anchor - start + torch.arange(shape.block_size), cache)
        torch.testing.assert_close(ours, torch.stack(expected), rtol=1e-9, atol=1e-9)


MIXTURES = [
    {"ce": 1.0, "dpace": 0.0},
    {"dpace": 1.0, "alpha": 0.3},
    {"kl": 1.0, "dpace": 0.0},
    {"tv": 1.0, "dpace": 0.0},
    {"ce": 0.7, "kl": 0.2, "tv": 0.5, "dpace": 0.0},
    {"ce": 0.3, "dpace": 0.9, "kl": 0.4, "tv": 0.6},
    {"dpace": 0.0, "dpace_kl": 1.0},
    {"ce": 0.3, "dpace": 0.4, "dpace_kl": 0.8},
]


@pytest.mark.parametrize("weights", MIXTURES, ids=lambda weights: "+".join(weights))
@pytest.mark.parametrize("kinds", [(FULL,), (SLIDING, FULL)], ids=["full", "sliding"])
def test_losses_and_parameter_gradients_equal_the_loops(weights, kinds):
    """One step of two batches: sums divided once, by the step's weight sum or valid anchors, also in a mixture of both."""
    config = LossConfig(gamma=2.5, **weights)
    shape = small_shape(layer_types=kinds, num_layers=len(kinds), sliding_window=3)
    fast, slow = small_model(shape), small_model(shape)
    embed, head = random(VOCAB, shape.hidden, seed=1), random(VOCAB, shape.hidden, seed=2)
    batches = [small_batch((6, 5), (0, 2, 3, 9), unsupervised=(4, 8), seed=1), small_batch((7,), (4, 5), seed=2)]
    total, slow_total = {WEIGHT: 0.0, ANCHORS: 0.0}, dict.fromkeys(("ce", "dpace", "kl", "tv", "dpace_kl", WEIGHT, ANCHORS), 0.0)
    sums = dict.fromkeys(slow_total, 0.0)
    gradients = {}
    for number, batch in enumerate(batches):
        features = random(batch.tokens, shape.features, seed=10 + number)
        teacher = random(batch.tokens, shape.hidden, seed=20 + number) if config.needs_teacher else None
        labels = Labels.of(batch, shape.block_size, config.gamma)
        rows = fast(features, Blocks.of(batch, shape.block_size), embed, labels.slots)
        teacher_rows = teacher[torch.from_numpy(labels.positions)] if config.needs_teacher else None
        result = block_losses(rows.detach(), head, labels, config, chunk=3, teacher=teacher_rows)
        for kind, gradient in result.gradients.items():
            parts = torch.autograd.grad(rows, list(fast.parameters()), gradient, retain_graph=True)
            gradients[kind] = [a + b for a, b in zip(gradients.get(kind, [0.0] * len(parts)), parts, strict=True)]
        outputs = all_outputs(dict(slow.named_parameters()), shape, batch, features, embed)
        loops = losses(outputs, batch, shape.block_size, head, config.gamma, config.alpha, teacher)
        for name in slow_total:
            slow_total[name] = slow_total[name] + loops[name]
            sums[name] += result.sums[name]
    for name, value in slow_total.items():
        assert sums[name] == pytest.approx(torch.as_tensor(value).item(), rel=1e-6), name
    total = {kind: sums[kind] for kind in gradients}
    ours = [sum(gradients[kind][i] / total[kind] for kind in total) for i in range(len(list(fast.parameters())))]
    expected = sum(getattr(config, name) * slow_total[name] for name in ("ce", "kl", "tv")) / slow_total[WEIGHT]
    expected = expected + (config.dpace * slow_total["dpace"] + config.dpace_kl * slow_total["dpace_kl"]) / slow_total[ANCHORS]
    expected.backward()
    for (name, parameter), gradient in zip(slow.named_parameters(), ours, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("weights", MIXTURES, ids=lambda weights: "+".join(weights))
def test_the_gradient_that_the_optimizer_sees_is_that_of_the_loops(weights):
    """Through the trainer in float32, from two batches to AdamW's first momentum."""
    shape = small_shape(layer_types=(SLIDING,), num_layers=1, sliding_window=3)
    trainer = small_trainer(shape, loss={"gamma": 2.5} | weights, optimizer={"clip": 1e9})
    config, slow = trainer.config.loss, small_model(shape)
    trainer.model.load_state_dict(slow.state_dict())
    total = dict.fromkeys(("ce", "dpace", "kl", "tv", "dpace_kl", WEIGHT, ANCHORS), 0.0)
    for number, batch in enumerate([small_batch((6, 5), (0, 2, 3, 9), unsupervised=(4, 8)), small_batch((7,), (4, 5), seed=2)]):
        features, teacher = features_for(batch, shape, number), random(batch.tokens, shape.hidden, seed=20 + number)
        rows = (np.arange(batch.tokens), teacher.float()) if config.needs_teacher else None
        trainer.micro_step(batch, features, rows)
        outputs = all_outputs(dict(slow.named_parameters()), shape, batch, features.double(), trainer.embed.double())
        loops = losses(outputs, batch, shape.block_size, trainer.head.double(), 2.5, config.alpha, teacher if rows else None)
        total = {name: total[name] + loops[name] for name in total}
    expected = sum(getattr(config, name) * total[name] for name in ("ce", "kl", "tv")) / total[WEIGHT]
    (expected + (config.dpace * total["dpace"] + config.dpace_kl * total["dpace_kl"]) / total[ANCHORS]).backward()
    report = trainer.optimizer_step(0)
    gradients = {name: parameter.grad for name, parameter in slow.named_parameters()}
    assert report["grad_norm"] == pytest.approx(math.sqrt(sum(g.square().sum().item() for g in gradients.values())), rel=1e-4)
    first = 1 - trainer.config.optimizer.betas[0]
    state = trainer.state_dict()[0]
    for name, gradient in gradients.items():
        torch.testing.assert_close(state[f"optimizer.exp_avg.{name}"].double() / first, gradient, rtol=1e-3, atol=1e-5)
