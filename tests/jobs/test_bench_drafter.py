"""The drafter's benchmark runs anywhere, counts what it says it counts, and refuses what it cannot measure."""

import json

import numpy as np
import pytest
import torch

from dflash_ray.planning.bench import bench_device
from jobs.benchmarks import drafter as bench_drafter
from jobs.benchmarks.measure_drafter import batch, make_trainer


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "deep" / "drafter.json"
    assert bench_drafter.main(["--json", str(path), "--repeats", "1", "--shape", "tiny-hybrid", "--chunk", "50"]) == 0
    return json.loads(path.read_text())


def test_every_case_has_its_rows(record):
    names = [row["name"].split(": ") for row in record["rows"]]
    assert [name[0] for name in names[::4]] == ["1 x 64, 8 anchors", "1 x 128, 8 anchors", "4 x 64, 8 anchors", "packed 256, 1 per 43"]
    assert [name[1] for name in names] == ["forward+backward", "forward+backward, added", "step", "step while staging"] * 4
    assert all(row["timing"]["median"] > 0 and row["tokens_per_second"] > 0 for row in record["rows"])
    assert record["head_chunk"] == 50 and record["ceiling_tflops"] > 0 and record["versions"]["torch"]


def test_losses_are_those_of_float64(record):
    assert all(record["comparisons"][f"{name} against float64"] < 1e-3 for name in ("ce", "dpace"))


def test_flops_are_the_counted_ones(record):
    """By hand: hidden 64, MLP 128, 4 and 1 heads of 16, 2 layers, 5 taps, vocabulary 512, block 8; 8 anchors in 64 tokens."""
    layer = 64 * 64 + 2 * 64 * 16 + 64 * 64 + 3 * 64 * 128
    expected = 6 * (8 * 8) * 2 * layer + 4 * (8 * 7) * 64 * 512 + 6 * 64 * (5 * 64 * 64 + 2 * 2 * 64 * 16)
    assert record["rows"][0]["flops"] == expected
    assert record["rows"][0]["facts"]["labels"] == 8 * 7


def test_every_anchor_of_a_uniform_case_has_all_its_labels():
    shape = make_trainer("tiny-hybrid", bench_device(), "adamw", None).shape
    one = batch([40, 30], [6, 3], shape)
    place = one.anchors - np.array([0, 40])[np.searchsorted(one.cu_seqlens, one.anchors, side="right") - 1]
    assert (place <= np.repeat([40, 30], [6, 3]) - shape.block_size).all() and len(set(one.anchors.tolist())) == 9


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--repeats", "0"], "--repeats: 0 times nothing"),
        pytest.param(["--profile", "x"], "on a GPU only", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")),
    ],
)
def test_what_cannot_be_measured_is_refused(argv, says):
    with pytest.raises(ValueError, match=says):
        bench_drafter.main(argv)
