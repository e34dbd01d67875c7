"""The fast path on a CUDA device: kernels against their twins and float64, packed against alone, families against float32 on a CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dflash_ray.target.load import load_target
from tests.support.kernel_cases import compare_all
from tests.support.tiny_targets import save_target
from tests.target.test_features import TAPS, make_batch, one_document, relative

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LIMIT = 1e-2
LENGTHS = (37, 1, 150, 12, 64, 65, 129, 300, 5, 77)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.float().cpu(), b.float().cpu()
    return ((a - b).norm() / b.norm()).item()


def test_kernels_equal_their_twins_and_float64():
    compare_all(torch.device("cuda"))


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3_sliding", "qwen3_5", "qwen3_5_moe"])
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_target(request.param, folder, wide=True)
    return folder, load_target(folder, taps=TAPS, device="cuda", require_fast=True)


def test_features_are_as_near_to_float32_as_plain_bf16_on_a_cpu(family):
    folder, target = family
    batch = make_batch(LENGTHS)
    exact = load_target(folder, taps=TAPS, device="cpu").features(batch)
    plain = load_target(folder, taps=TAPS, device="cpu", precision="bf16").features(batch)
    found = target.features(batch)
    assert found.dtype == torch.bfloat16 and found.is_cuda
    assert distance(found, exact) < 1.3 * distance(plain, exact)
    padded = target.features(dataclasses.replace(batch, layout="padded"))
    assert distance(padded, exact) < 1.3 * distance(plain, exact)


def test_packed_documents_equal_documents_alone_wherever_they_stand(family):
    _, target = family
    if target.shape.config.get("num_experts"):
        pytest.skip("a token on the edge between two experts may visit another one after rounding")
    batch = make_batch(LENGTHS)
    packed = target.features(batch)
    errors = []
    for index in range(batch.documents):
        start, end = batch.cu_seqlens[index : index + 2]
        errors.append(distance(packed[start:end], target.features(one_document(batch, index))))
    assert max(errors) < LIMIT
    assert sum(errors[5:]) < 2 * sum(errors[:5]) + 1e-3, errors


def test_nothing_moves_when_another_document_changes(family):
    _, target = family
    batch = make_batch(LENGTHS)
    changed = batch.input_ids.copy()
    changed[: LENGTHS[0]] = changed[: LENGTHS[0]][::-1]
    before, after = target.features(batch), target.features(dataclasses.replace(batch, input_ids=changed))
    assert torch.equal(before[LENGTHS[0] :], after[LENGTHS[0] :])


def test_teacher_rows(family):
    folder, _ = family
    whole = load_target(folder, taps=TAPS, device="cuda", teacher=True, require_fast=True)
    batch = make_batch(LENGTHS)
    _, positions, rows = whole.features_and_teacher(batch, 8)
    _, _, exact = load_target(folder, taps=TAPS, device="cpu", teacher=True).features_and_teacher(batch, 8)
    _, _, plain = load_target(folder, taps=TAPS, device="cpu", teacher=True, precision="bf16").features_and_teacher(batch, 8)
    assert len(positions) == len(rows) and distance(rows, exact) < 1.3 * distance(plain, exact)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_fp8_features_are_as_near_as_reported(name, tmp_path):
    save_target(name, tmp_path, wide=True)
    target = load_target(tmp_path, taps=TAPS, device="cuda", precision="fp8")
    exact = load_target(tmp_path, taps=TAPS, device="cuda", require_fast=True)
    batch = make_batch(LENGTHS)
    reported = target.kernels.fp8_feature_error
    found, expected = (t.features(batch).view(batch.tokens, len(TAPS), -1) for t in (target, exact))
    for column, tap in enumerate(TAPS):
        assert distance(found[:, column], expected[:, column]) < 2 * reported[tap] < 1.0


def test_two_kinds_of_layer_at_the_real_shape():
    target = load_target(None, taps=[3], device="cuda", random_shape="qwen3.6-27b", require_fast=True)
    report = target.kernels
    assert set(report.fast_error) == {"attention", "delta"}
    assert all(error < max(LIMIT, report.plain_error[kind]) for kind, error in report.fast_error.items())
    assert max(report.packed_against_alone.values()) < LIMIT
    assert relative(*[target.features(make_batch(LENGTHS)).float()] * 2) == 0.0


def test_a_float32_target_runs_documents_apart_and_says_why(tmp_path):
    save_target("qwen3", tmp_path, wide=True)
    target = load_target(tmp_path, taps=TAPS, device="cuda", precision="float32")
    assert target.fast is None and "float32" in target.kernels.reason
    batch = make_batch(LENGTHS)
    assert distance(target.features(batch), load_target(tmp_path, taps=TAPS, device="cpu").features(batch)) < 1e-3
