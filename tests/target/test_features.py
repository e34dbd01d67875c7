"""Features of the frozen target: the untouched model's own hidden states, whatever the layout, with no document seeing another."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch

from dflash_ray.data.batches.batch import Batch
from dflash_ray.target.devices import mixers_for
from dflash_ray.target.load import load_target
from dflash_ray.target.model import teacher_positions
from dflash_ray.target.plain.mixers import DocumentBounds, delta_rule
from tests.support.tiny_targets import FAMILIES, VOCAB, as_multimodal, save_target

TAPS = [1, 3, 5]
LENGTHS = (37, 1, 150, 12)
HYBRIDS = ("qwen3_5", "qwen3_5_moe")


def make_batch(lengths=LENGTHS, seed: int = 0, anchors=(3, 20, 40, 41, 180)) -> Batch:
    rng = np.random.default_rng(seed)
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    total = int(bounds[-1])
    return Batch(
        number=0,
        epoch=0,
        sample_ids=np.arange(len(lengths)),
        input_ids=rng.integers(3, VOCAB, total).astype(np.int32),
        cu_seqlens=bounds,
        loss_mask=(rng.random(total) < 0.8).astype(np.uint8),
        anchors=np.array([a for a in anchors if a < total], dtype=np.int32),
    )


def one_document(batch: Batch, index: int) -> Batch:
    start, end = batch.cu_seqlens[index : index + 2]
    return dataclasses.replace(
        batch,
        sample_ids=batch.sample_ids[index : index + 1],
        input_ids=batch.input_ids[start:end],
        cu_seqlens=np.array([0, end - start], dtype=np.int32),
        loss_mask=batch.loss_mask[start:end],
        anchors=np.array([], dtype=np.int32),
    )


def hooked_taps(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """[T, L*H] from forward hooks on transformers' decoder layers, document by document."""
    seen: dict[int, torch.Tensor] = {}
    handles = [
        model.model.layers[tap].register_forward_hook(
            lambda module, inputs, output, tap=tap: seen.__setitem__(tap, output[0] if isinstance(output, tuple) else output)
        )
        for tap in TAPS
    ]
    rows = []
    for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        model(torch.from_numpy(batch.input_ids[start:end].astype(np.int64))[None], use_cache=False)
        rows.append(torch.cat([seen[tap].reshape(end - start, -1) for tap in TAPS], dim=-1))
    for handle in handles:
        handle.remove()
    return torch.cat(rows)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative distance of the whole, or a tenth of the worst token's, so that one wrong token cannot hide among many right ones."""
    worst = ((a - b).norm(dim=-1) / b.norm(dim=-1)).max()
    return max((a - b).norm() / b.norm(), worst / 10).item()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = save_target(request.param, folder)
    return request.param, folder, model, load_target(folder, taps=TAPS, device="cpu")


def test_taps_are_the_hidden_states_of_the_untouched_model(family):
    _, _, model, target = family
    batch = make_batch()
    assert relative(target.features(batch), hooked_taps(model, batch)) < 3e-5


def test_a_document_alone_has_the_same_bits_as_packed(family):
    _, _, _, target = family
    batch = make_batch()
    packed = target.features(batch)
    for index in range(batch.documents):
        start, end = batch.cu_seqlens[index : index + 2]
        assert torch.equal(target.features(one_document(batch, index)), packed[start:end])


def test_padded_rows_equal_documents_alone(family):
    _, _, _, target = family
    batch = make_batch()
    padded = dataclasses.replace(batch, layout="padded")
    assert relative(target.features(padded), target.features(batch)) < 1e-5


def test_one_row_with_cu_seqlens_equals_documents_alone(family):
    _, _, _, target = family
    batch = make_batch()
    assert relative(target.features(batch, varlen=True), target.features(batch)) < 1e-5


def test_another_document_moves_nothing_in_one_row_with_cu_seqlens(family):
    _, _, _, target = family
    batch = make_batch()
    changed = batch.input_ids.copy()
    changed[: LENGTHS[0]] = changed[: LENGTHS[0]][::-1]
    other = dataclasses.replace(batch, input_ids=changed)
    before, after = target.features(batch, varlen=True), target.features(other, varlen=True)
    assert torch.equal(before[LENGTHS[0] :], after[LENGTHS[0] :])
    assert not torch.equal(before[: LENGTHS[0]], after[: LENGTHS[0]])


def test_layers_past_the_last_tap_are_not_loaded(family):
    _, folder, _, target = family
    assert len(target.layers) == TAPS[-1] + 1
    assert target.head is None and target.final_norm is None
    assert len(load_target(folder, taps=TAPS, device="cpu", teacher=True).layers) == target.shape.num_layers


def test_teacher_rows_predict_what_greedy_decoding_says_next(family):
    _, folder, model, _ = family
    target = load_target(folder, taps=TAPS, device="cpu", with_head=True)
    batch = make_batch()
    features, positions, rows = target.features_and_teacher(batch, 8)
    assert torch.equal(features, target.features(batch))
    for start, end in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:], strict=False):
        inside = (positions >= start) & (positions < end)
        logits = model(torch.from_numpy(batch.input_ids[start:end].astype(np.int64))[None], use_cache=False).logits[0]
        greedy = logits[torch.from_numpy(positions[inside] - start)].argmax(-1)
        assert torch.equal((rows[torch.from_numpy(inside)] @ target.head.t()).argmax(-1), greedy)
    for layout in ({"layout": "padded"}, {}):
        _, again, other = target.features_and_teacher(dataclasses.replace(batch, **layout), 8, varlen=not layout)
        assert np.array_equal(again, positions) and relative(other, rows) < 1e-5


def test_teacher_positions_are_those_whose_next_token_is_a_counted_label():
    batch = make_batch(anchors=(0, 3, 36, 37, 40, 41, 180, 199))
    expected = set()
    for anchor in batch.anchors.tolist():
        end = min(bound for bound in batch.cu_seqlens.tolist() if bound > anchor)
        for slot in range(1, 8):
            if anchor + slot < end and batch.loss_mask[anchor + slot]:
                expected.add(anchor + slot - 1)
    assert teacher_positions(batch, 8).tolist() == sorted(expected)


@pytest.mark.parametrize("name", HYBRIDS)
def test_text_part_of_a_multimodal_checkpoint_reads_like_the_text_model(name, tmp_path):
    save_target(name, tmp_path)
    batch = make_batch()
    plain = load_target(tmp_path, taps=TAPS, device="cpu").features(batch)
    as_multimodal(tmp_path)
    assert torch.equal(load_target(tmp_path, taps=TAPS, device="cpu").features(batch), plain)


def test_an_empty_batch_has_no_features(family):
    _, _, _, target = family
    batch = make_batch(lengths=())
    assert target.features(batch).shape == (0, len(TAPS) * 32)


def test_float16_is_refused(tmp_path):
    save_target("llama", tmp_path)
    with pytest.raises(ValueError, match="float16"):
        load_target(tmp_path, taps=TAPS, device="cpu", precision="fp16")


def test_bf16_features_are_as_near_to_float32_as_transformers_own(family):
    name, folder, model, target = family
    if "moe" in name:
        pytest.skip("rounding sends tokens to other experts, in transformers' run and in ours, not to the same ones")
    batch = make_batch()
    exact = target.features(batch)
    half = load_target(folder, taps=TAPS, device="cpu", precision="bf16").features(batch)
    assert half.dtype == torch.bfloat16

    def distance(features: torch.Tensor) -> float:
        return ((features.float() - exact).norm() / exact.norm()).item()

    assert distance(half) < 1.3 * distance(hooked_taps(copy.deepcopy(model).bfloat16(), batch))


def test_random_weights_at_a_known_shape_give_finite_features():
    target = load_target(None, taps=TAPS, device="cpu", random_shape="tiny-hybrid")
    features = target.features(make_batch())
    assert torch.isfinite(features).all() and features.abs().amax() > 0


@pytest.mark.parametrize("alike", [0.0, 3.0])
def test_delta_rule_is_the_recurrence_in_float64(alike):
    """Token by token in float64, over lengths that fill chunks, end inside one, and for keys that point the same way."""
    torch.manual_seed(0)
    for length in (1, 5, 64, 65, 130):
        q, k = torch.randn(2, 1, length, 2, 8).unbind(0)
        k = k + alike * torch.randn(1, 1, 2, 8)
        v, g, beta = torch.randn(1, length, 4, 6), -torch.rand(1, length, 4), torch.rand(1, length, 4)
        expected = torch.zeros(length, 4, 6, dtype=torch.float64)
        for head in range(4):
            state = torch.zeros(8, 6, dtype=torch.float64)
            for t in range(length):
                key, query = k[0, t, head // 2].double(), q[0, t, head // 2].double()
                key, query = key / (key @ key + 1e-6).sqrt(), query / (query @ query + 1e-6).sqrt()
                state = state * g[0, t, head].double().exp()
                state = state + torch.outer(key, beta[0, t, head].double() * (v[0, t, head].double() - state.T @ key))
                expected[t, head] = state.T @ query / 8**0.5
        out = delta_rule(q, k, v, g, beta, bounds=DocumentBounds())[0]
        assert (out - expected).norm() < 1e-6 * expected.norm()


def test_nothing_of_triton_is_called_on_a_cpu():
    """transformers binds flash-linear-attention at import where it is installed; a launch would die for want of a driver."""
    mixers = mixers_for(torch.device("cpu"))
    for mixer in (mixers.attention, mixers.short_conv, mixers.delta_rule, mixers.delta_prefill):
        assert mixer.__module__ == "dflash_ray.target.plain.mixers"
    with pytest.raises(ValueError, match="cpu or cuda"):
        mixers_for(torch.device("meta"))
