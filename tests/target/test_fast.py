"""The fast path of the target: one packed pass gives what the plain layers give document by document; where it does not, it is refused."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_ray.target.cost import active_parameters, counted_flops
from dflash_ray.target.devices import fused_for
from dflash_ray.target.fast import FastLayer
from dflash_ray.target.load import load_target
from dflash_ray.target.plain.mixers import DocumentBounds
from dflash_ray.target.self_test import FastPathRefused, SelfTest
from dflash_ray.target.shape import read_target_shape, target_shape_of_config
from tests.support.tiny_targets import CONFIGS, FAMILIES, save_target
from tests.target.test_features import TAPS, make_batch, relative

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_target(request.param, folder)
    return folder, load_target(folder, taps=TAPS, device="cpu", fast=True, require_fast=True)


def test_one_fast_pass_equals_plain_layers_document_by_document(family):
    _, target = family
    batch = make_batch()
    assert relative(target.features(batch), target.features(batch, varlen=False)) < 1e-4


def test_a_padded_batch_runs_fast_too(family):
    _, target = family
    padded = dataclasses.replace(make_batch(), layout="padded")
    assert relative(target.features(padded), target.features(padded, varlen=False)) < 1e-4


def test_another_document_moves_nothing(family):
    _, target = family
    batch = make_batch()
    changed = batch.input_ids.copy()
    end = batch.cu_seqlens[1]
    changed[:end] = changed[:end][::-1]
    before, after = target.features(batch), target.features(dataclasses.replace(batch, input_ids=changed))
    assert torch.equal(before[end:], after[end:]) and not torch.equal(before[:end], after[:end])


def test_empty_batches_and_teacher_rows(family):
    folder, target = family
    assert target.features(make_batch(lengths=())).shape == (0, len(TAPS) * 32)
    whole = load_target(folder, taps=TAPS, device="cpu", teacher=True, fast=True)
    for layout in ("packed", "padded"):
        batch = dataclasses.replace(make_batch(), layout=layout)
        features, positions, rows = whole.features_and_teacher(batch, 8)
        expected, same, others = whole.features_and_teacher(batch, 8, varlen=False)
        assert relative(features, expected) < 1e-4 and relative(rows, others) < 1e-4 and np.array_equal(positions, same)


@pytest.mark.slow
def test_interpreted_kernels_equal_their_twins_and_float64():
    """Triton's own interpreter runs every kernel on the CPU; it has to be chosen before Triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.support.kernel_cases"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def leaking(name: str):
    """The fused functions with one that does not know where documents end."""
    fused = fused_for(CPU)
    function = getattr(fused, name)

    def one_document(*args, **kwargs):
        if "bounds" in kwargs:
            kwargs["bounds"] = DocumentBounds(torch.tensor([0, len(args[0])], dtype=torch.int32), (len(args[0]),))
        else:
            *args, positions = args
            args.append(torch.arange(len(positions), dtype=torch.int32))
        return function(*args, **kwargs)

    return dataclasses.replace(fused, **{name: one_document})


@pytest.mark.parametrize("name", ["attention", "conv_heads", "delta_rule", ""])
def test_the_start_test_refuses_kernels_that_leak(name, tmp_path):
    save_target("qwen3_5", tmp_path)
    target = load_target(tmp_path, taps=TAPS, device="cpu")
    test = SelfTest(target.embedding, target.rotary_table, delta=True, warm_tokens=64)
    fused = leaking(name) if name else fused_for(CPU)

    def run():
        for index, layer in enumerate(target.layers):
            test.check(index, layer, FastLayer(layer, fused))

    if name:
        with pytest.raises(FastPathRefused, match=r"layer \d \(.*\): the first 8 tokens of document 2 packed and alone differ"):
            run()
    else:
        run()
        assert test.report.reason == "" and set(test.report.packed_against_alone) == {"attention", "delta"}


def test_a_refused_fast_path_leaves_plain_layers_and_a_reason(tmp_path):
    save_target("qwen3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.2.self_attn.v_proj.weight"][0, 0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    target = load_target(tmp_path, taps=TAPS, device="cpu", fast=True)
    assert target.fast is None and "layer 2 (attention)" in target.kernels.reason and len(target.layers) == TAPS[-1] + 1
    batch = make_batch()
    first = slice(0, 32)  # the tap before the broken layer
    assert torch.equal(target.features(batch)[:, first], target.features(batch, varlen=False)[:, first])
    with pytest.raises(ValueError, match="require_fast_path.*layer 2"):
        load_target(tmp_path, taps=TAPS, device="cpu", fast=True, require_fast=True)
    with pytest.raises(ValueError, match="fp8 needs the fast path.*layer 2"):
        load_target(tmp_path, taps=TAPS, device="cpu", fast=True, precision="fp8")


@pytest.mark.parametrize("name", ["qwen3_5", "llama3_rope"])
def test_fp8_reports_its_feature_error_and_keeps_to_it(name, tmp_path):
    save_target(name, tmp_path)
    exact = load_target(tmp_path, taps=TAPS, device="cpu")
    target = load_target(tmp_path, taps=TAPS, device="cpu", precision="fp8", fast=True)
    reported = target.kernels.fp8_feature_error
    assert sorted(reported) == TAPS and not target.layers
    batch = make_batch()
    found, expected = (t.features(batch).float().view(batch.tokens, len(TAPS), -1) for t in (target, exact))
    for column, tap in enumerate(TAPS):
        error = ((found - expected)[:, column].norm() / expected[:, column].norm()).item()
        assert 0.5 * reported[tap] < error < 2 * reported[tap] < 1.5


def test_fp8_is_refused_where_it_cannot_be(tmp_path):
    save_target("llama", tmp_path)
    for kwargs in ({}, {"with_head": True}):
        with pytest.raises(ValueError, match="target.precision: fp8 computes features on a GPU"):
            load_target(tmp_path, taps=TAPS, device="cpu", precision="fp8", **kwargs)


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "qwen3_sliding"])
def test_counted_flops_are_two_per_parameter_and_four_per_pair_and_feature(name, tmp_path):
    model = save_target(name, tmp_path)
    target_shape = read_target_shape(tmp_path)
    parameters = sum(p.numel() for layer in model.model.layers[:5] for p in layer.parameters())
    assert active_parameters(target_shape, 5) == parameters
    lengths, pairs = np.array([300, 41]), 0
    for kind in target_shape.layer_types[:5]:
        reach = {"full_attention": 10**9, "sliding_attention": target_shape.config.get("sliding_window"), "linear_attention": 0}[kind]
        pairs += sum(min(position + 1, reach) for length in lengths for position in range(length))
    expected = 2 * parameters * lengths.sum() + 4 * target_shape.num_attention_heads * target_shape.head_dim * pairs
    assert counted_flops(target_shape, 5, lengths) == pytest.approx(expected, rel=5e-3)


def test_experts_that_a_token_does_not_visit_are_not_counted():
    config = CONFIGS["qwen3_moe"]().to_dict()
    target_shape = target_shape_of_config(config, {}, where="test")
    visiting_all = target_shape_of_config({**config, "num_experts_per_tok": 4}, {}, where="test")
    idle = 2 * 3 * 32 * 24  # two of four experts, gate, up and down; layer 1 is dense
    assert active_parameters(visiting_all, 4) - active_parameters(target_shape, 4) == 3 * idle
