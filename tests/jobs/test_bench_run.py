"""The transport, pipeline and coordinator benchmarks run anywhere, on real actors, and write what they say."""

import json
import subprocess
import sys

import pytest

from jobs.benchmarks import coordinator as bench_coordinator
from jobs.benchmarks import pipeline as bench_pipeline
from jobs.benchmarks import transport as bench_transport
from tests.support.processes import ROOT, environment

pytestmark = pytest.mark.ray


def run_job(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "jobs.bench", *argv], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_transport(tmp_path):
    out = tmp_path / "deep" / "transport.json"
    done = run_job("transport", "--tokens", "64", "--messages", "3", "--json", str(out))
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    names = [row["name"] for row in record["rows"]]
    assert names[:4] == [f"object store, {n} source(s), {how}" for n in (1, 2) for how in ("one at a time", "overlapped")]
    assert record["message_bytes"] == 64 * 640 * 2
    for row in record["rows"]:
        assert row["gigabytes_per_second"] == pytest.approx(record["message_bytes"] / row["seconds"] / 1e9)


@pytest.mark.slow
def test_pipeline(tmp_path):
    out = tmp_path / "pipeline.json"
    done = run_job("pipeline", "--seconds", "2", "--json", str(out), "--train.batches_per_step", "1", "--tokens-per-anchor", "43", "5")
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert [run["tokens_per_anchor"] for run in record["runs"]] == [43, 5]
    for run in record["runs"]:
        slower = run["slower_stage"]
        assert run["alone"][slower] == min(run["alone"].values()) > 0
        assert run["share_of_slower_stage"] == pytest.approx(run["run"]["real_tokens_per_second"] / run["alone"][slower])
        assert run["summary"]["steps"] > run["run"]["steps"] >= 3 and run["summary"]["topology"] == "1-1"


def test_coordinator(tmp_path):
    out = tmp_path / "coordinator.json"
    done = run_job("coordinator", "--targets", "2", "--batches", "800", "--json", str(out))
    assert done.returncode == 0, done.stderr
    flow, coordinator = json.loads(out.read_text())["rows"]
    assert flow["name"] == "flow, 256 targets" and flow["batches_per_second"] > 0
    assert coordinator["name"] == "coordinator, 2 targets" and 0 < coordinator["batches"] <= 600
    assert coordinator["batches_per_second"] > 0 and coordinator["cpu_ms_per_batch"] > 0 and coordinator["slowest_status_ms"] > 0


@pytest.mark.parametrize(
    ("job", "argv", "says"),
    [
        (bench_coordinator, ["--batches", "100"], "--batches 100: give at least 400"),
        (bench_transport, ["--tokens", "0"], "--tokens: 0 is too few"),
        (bench_transport, ["--messages", "1"], "--messages: 1 is too few"),
        (bench_pipeline, ["--seconds", "0"], "--seconds: 0 is no time"),
    ],
)
def test_bad_input_is_one_line(job, argv, says):
    with pytest.raises(ValueError, match=says):
        job.main(argv)
