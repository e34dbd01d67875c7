"""The benchmark jobs run on a CPU with a tiny shape and write what they measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_ray.planning.bench import document_lengths
from jobs import bench


def test_target_benchmark_on_a_tiny_shape(tmp_path, capsys):
    out = tmp_path / "target.json"
    assert (
        bench.main(["target", "--shape", "tiny-hybrid", "--precision", "both", "--layers", "4", "--repeats", "1", "--json", str(out)]) == 0
    )
    record = json.loads(out.read_text())
    rows = {row["name"]: row for row in record["rows"]}
    for name in ("bf16 packed 16k", "bf16 uniform 32k", "bf16 random padded 32k", "fp8 packed 16k"):
        assert rows[name]["tokens_per_second"] > 0 and 0 < rows[name]["share_of_ceiling"] < 1
    padded = rows["bf16 random padded 32k"]
    assert padded["tokens"] < 0.8 * padded["facts"]["allocated_tokens"] <= 0.8 * 4 * 256
    assert len([name for name in rows if name.startswith("bf16 bucket")]) == 6
    assert (
        record["ceiling_tflops"] > 0
        and record["sustained_ceiling_tflops"] > 0
        and record["versions"]["torch"]
        and record["kernels_fp8"]["fp8_feature_error"]
    )
    assert {"bf16 packed over uniform", "bf16 packed over six buckets", "fp8 over bf16, packed"} <= set(record["comparisons"])
    assert "bf16 packed 16k" in capsys.readouterr().out


def test_preparation_benchmark(tmp_path, capsys):
    out, rows = tmp_path / "prepare.json", tmp_path / "rows.jsonl"
    rows.write_text("".join(Path("jobs/quickstart/heldout.jsonl").read_text().splitlines(keepends=True)[:40]))
    assert bench.main(["prepare", "--input", str(rows), "--repeats", "1", "--json", str(out)]) == 0
    (run,) = json.loads(out.read_text())["runs"]
    assert run["lines_read"] == run["kept"] == 40 and run["tokens"] > 1000
    # the report's seconds are rounded to thousandths
    assert run["tokens"] / run["tokens_per_second"] == pytest.approx(run["seconds"], abs=0.0006) and run["peak_memory_bytes"] > 1 << 26
    assert f"{run['tokens']:,} tokens in" in capsys.readouterr().out


def test_what_cannot_be_measured_is_said():
    with pytest.raises(ValueError, match="'turbo' is no part.*target, drafter"):
        bench.main(["turbo"])
    with pytest.raises(ValueError, match="--input /nowhere: no such file"):
        bench.main(["prepare", "--input", "/nowhere", "--repeats", "1"])
    with pytest.raises(ValueError, match="--layers: 8 is outside 1..7"):
        bench.main(["target", "--shape", "tiny-hybrid", "--layers", "8"])


def test_lengths_have_the_corpus_mean_and_scale():
    lengths = document_lengths(20_000, 8192)
    assert 1_950 < lengths.mean() < 2_100 and lengths.max() == 8192 and lengths.min() >= 32
    assert abs(document_lengths(20_000, 256).mean() / lengths.mean() * 32 - 1) < 0.02
