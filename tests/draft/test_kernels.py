"""Triton kernels say what their plain twins say: run by Triton's interpreter here, compiled on a GPU machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")


def worst(errors: dict[str, dict[str, float]], limit: float) -> list[str]:
    return [f"{group}, {name}: {value:.1e}" for group, found in errors.items() for name, value in found.items() if not value < limit]


@pytest.mark.slow
def test_interpreted_kernels_equal_their_twins():
    """In a process of its own: whether kernels are interpreted is decided when Triton is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.draft_kernels"]
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-2000:]
    errors = json.loads(run.stdout)
    assert errors["adamw"].pop("copy") < 4e-3  # bf16
    assert worst(errors, 1e-5) == []


@pytest.mark.gpu
def test_compiled_kernels_equal_their_twins_in_bf16():
    """A few cases, because each is compiled for itself."""
    from tests.support.draft_kernels import all_errors

    cases = ("documents, sliding", "longer than a tile, full", "a block fills a tile")
    assert worst(all_errors("cuda", torch.bfloat16, cases), 1e-2) == []


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1024])
def test_attention_at_the_real_block_shape(window):
    """32 query and 8 key heads of 128, block 16, documents of many tiles; twice the same bits, since no sum depends on timing."""
    from tests.support.draft_kernels import attention_errors

    lengths, anchors = (700, 1500, 40, 3000), (*range(5, 690, 90), *range(701, 2190, 31), 2210, *range(2300, 5230, 29))
    first, second = (attention_errors("cuda", torch.bfloat16, (16, 8, 4, 128, window, lengths, anchors)) for _ in range(2))
    assert worst({"attention": first}, 1e-2) == []
    assert first == second


@pytest.mark.gpu
def test_the_head_at_the_real_vocabulary():
    from tests.support.draft_kernels import head_errors

    assert worst({"head": head_errors("cuda", torch.bfloat16, 248_320, 200, 128)}, 1e-2) == []


@pytest.mark.gpu
def test_a_teacher_at_the_real_vocabulary():
    from tests.support.draft_kernels import MIXTURES, head_errors

    # float32 logits put some of 248,320 tokens on the other side of p = t, where tv's slope jumps: 1.1e-4 on an H200
    for dtype, limit in ((torch.float32, 3e-4), (torch.bfloat16, 1e-2)):
        errors = {name: head_errors("cuda", dtype, 248_320, 200, 128, mixture, True) for name, mixture in MIXTURES.items()}
        assert worst(errors, limit) == [], dtype
