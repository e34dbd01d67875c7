"""What must not matter does not move a bit; what must matter moves."""

import numpy as np
import pytest
import torch

from dflash_ray.draft.blocks.mask import SLICE_ANCHORS, Blocks
from dflash_ray.draft.dflash.model import DraftModel, initialise, rotate
from dflash_ray.draft.dflash.shape import FULL, SLIDING
from tests.support.draft_cases import VOCAB, random, small_batch, small_model, small_shape

KINDS = [(FULL, FULL), (SLIDING, FULL), (SLIDING, SLIDING)]


def setting(kinds=(FULL, FULL), lengths=(12, 9), anchors=(2, 3, 4, 8, 14, 15), **changes):
    shape = small_shape(layer_types=kinds, num_layers=len(kinds), sliding_window=5, **changes)
    batch = small_batch(lengths, anchors)
    return shape, batch, small_model(shape), random(batch.tokens, shape.features), random(VOCAB, shape.hidden, seed=1)


def outputs(shape, batch, model, features, embed):
    return model(features, Blocks.of(batch, shape.block_size), embed)


@pytest.mark.parametrize("kinds", KINDS)
def test_features_at_or_after_the_anchor_do_not_reach_the_block(kinds):
    shape, batch, model, features, embed = setting(kinds)
    before = outputs(shape, batch, model, features, embed)
    for index, anchor in enumerate(batch.anchors.tolist()):
        changed = features.clone()
        changed[anchor:] += 1.0
        after = outputs(shape, batch, model, changed, embed)
        assert torch.equal(before[: index + 1], after[: index + 1])
        changed = features.clone()
        changed[anchor - 1] += 1.0
        assert not torch.equal(before[index], outputs(shape, batch, model, changed, embed)[index])


@pytest.mark.parametrize("kinds", KINDS)
def test_another_document_does_not_reach_the_block(kinds):
    shape, batch, model, features, embed = setting(kinds)
    before = outputs(shape, batch, model, features, embed)
    changed = features.clone()
    changed[:12] *= -2.0
    after = outputs(shape, batch, model, changed, embed)
    assert torch.equal(before[4:], after[4:])
    assert not torch.equal(before[:4], after[:4])


def test_another_block_does_not_reach_the_block():
    shape, batch, model, features, embed = setting()
    together = outputs(shape, batch, model, features, embed)
    for index, anchor in enumerate(batch.anchors.tolist()):
        alone = outputs(shape, small_batch((12, 9), (anchor,)), model, features, embed)
        torch.testing.assert_close(alone[0], together[index], rtol=1e-12, atol=1e-12)


def test_order_and_company_of_documents_do_not_matter():
    shape, batch, model, features, embed = setting()
    before = outputs(shape, batch, model, features, embed)
    ids = np.concatenate([batch.input_ids[12:], batch.input_ids[:12], [5, 6]]).astype(np.int32)
    swapped = small_batch((9, 12, 2), (2, 3, 11, 12, 13, 17))
    swapped = type(batch)(**{**vars(swapped), "input_ids": ids})
    after = outputs(shape, swapped, model, torch.cat([features[12:], features[:12], features[:2]]), embed)
    torch.testing.assert_close(after, before[[4, 5, 0, 1, 2, 3]], rtol=1e-12, atol=1e-12)


def test_position_in_the_document_matters():
    """A token more in front moves every position by one, and rotations must follow."""
    shape, batch, model, features, embed = setting(lengths=(6,), anchors=(3,))
    longer = small_batch((7,), (4,))
    longer = type(batch)(**{**vars(longer), "input_ids": np.concatenate([[1], batch.input_ids]).astype(np.int32)})
    shifted = outputs(shape, longer, model, torch.cat([features[:1], features]), embed)
    assert not torch.allclose(shifted, outputs(shape, batch, model, features, embed), atol=1e-6)


def test_sliding_layers_forget_what_the_window_left_behind():
    shape, batch, model, features, embed = setting((SLIDING, SLIDING), lengths=(12,), anchors=(10,))
    before = outputs(shape, batch, model, features, embed)
    changed = features.clone()
    changed[:6] += 1.0  # slot 0 at position 10 sees keys from 6 on, window 5
    assert torch.equal(before, outputs(shape, batch, model, changed, embed))
    changed[6] += 1.0
    after = outputs(shape, batch, model, changed, embed)
    assert not torch.equal(before[0, 0], after[0, 0])


def test_a_document_with_more_anchors_than_a_run_holds():
    """Runs are only a way to save memory."""
    length = SLICE_ANCHORS + 40
    shape, _, model, _, embed = setting((SLIDING, FULL))
    features = random(length, shape.features)
    batch = small_batch((length,), tuple(range(length - 1)))
    whole = outputs(shape, batch, model, features, embed)
    for anchor in (0, 5, SLICE_ANCHORS - 1, SLICE_ANCHORS, length - 2):
        one = small_batch((length,), (anchor,))
        torch.testing.assert_close(outputs(shape, one, model, features, embed)[0], whole[anchor], rtol=1e-12, atol=1e-12)


def test_chosen_slots_are_the_same_numbers_as_all_slots():
    shape, batch, model, features, embed = setting((SLIDING, FULL))
    blocks = Blocks.of(batch, shape.block_size)
    slots = torch.tensor([1, 2, 7, 13, 23])
    torch.testing.assert_close(model(features, blocks, embed, slots), model(features, blocks, embed).flatten(0, 1)[slots])


@pytest.mark.parametrize("kinds", KINDS)
def test_serving_a_batch_of_sequences_of_different_length(kinds):
    """One static cache with garbage behind each sequence's end gives what each sequence gives alone."""
    shape, _, model, features, embed = setting(kinds)
    anchors = torch.tensor([3, 9, 6])
    sequences = [random(12, shape.features, seed=seed) for seed in range(3)]
    positions = anchors[:, None] + torch.arange(shape.block_size)
    blocks = model.block_embeddings(torch.tensor([1, 2, 3]), embed)
    cache = model.context_kv(model.context(torch.stack(sequences)), torch.arange(12).expand(3, -1))
    together = model.forward_block(blocks, positions, cache)
    for index, (anchor, sequence) in enumerate(zip(anchors.tolist(), sequences, strict=True)):
        alone = model.context_kv(model.context(sequence[:anchor]), torch.arange(anchor))
        expected = model.forward_block(blocks[index], positions[index], alone)
        torch.testing.assert_close(together[index], expected, rtol=1e-12, atol=1e-12)
        later = torch.arange(max(0, anchor - 5), anchor)  # a cache that dropped what no sliding window reaches
        if kinds == (SLIDING, SLIDING):
            short = model.context_kv(model.context(sequence[later]), later)
            torch.testing.assert_close(model.forward_block(blocks[index], positions[index], short, later), expected, rtol=1e-12, atol=1e-12)


def test_a_cache_grows_token_by_token_into_the_same_numbers():
    shape, _, model, features, embed = setting()
    whole = model.context_kv(model.context(features[:6]), torch.arange(6))
    parts = [model.context_kv(model.context(features[a:b]), torch.arange(a, b)) for a, b in ((0, 3), (3, 4), (4, 6))]
    for layer, (keys, values) in enumerate(whole):
        torch.testing.assert_close(torch.cat([part[layer][0] for part in parts], -2), keys)
        torch.testing.assert_close(torch.cat([part[layer][1] for part in parts], -2), values)


def test_rotation_is_float32_and_follows_the_targets_theta():
    model = DraftModel(small_shape(rope_theta=1e7, head_dim=64)).to(torch.bfloat16)
    cos, sin = model.rotation(torch.tensor([1, 200_000]))
    assert cos.dtype == sin.dtype == torch.float32
    assert torch.atan2(sin, cos)[0, 0, 1].item() == pytest.approx(1e7 ** (-2 / 64), rel=1e-6)
    exact = torch.cos(torch.tensor(200_000 * 1e7 ** (-2 / 64), dtype=torch.float64))
    assert cos[1, 0, 1].item() == pytest.approx(exact.item(), abs=0.01)
    assert rotate(torch.ones(2, 1, 64, dtype=torch.bfloat16), (cos, sin)).dtype == torch.bfloat16


def test_parameters_are_the_export_contract():
    shape = small_shape(num_layers=3, layer_types=(FULL, SLIDING, FULL), sliding_window=4)
    model = DraftModel(shape)
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == shape.tensor_shapes()
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters


def test_initial_weights_depend_on_the_seed_alone():
    first, second, third = (DraftModel(small_shape()) for _ in range(3))
    initialise(first, 1)
    torch.rand(5)  # the global generator must not matter
    initialise(second, 1)
    initialise(third, 2)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    matrices = [(a, b) for a, b in zip(first.parameters(), third.parameters(), strict=True) if a.dim() == 2]
    assert not any(torch.equal(a, b) for a, b in matrices)
    assert len({round(a.flatten()[0].item(), 7) for a, _ in matrices}) == len(matrices)
