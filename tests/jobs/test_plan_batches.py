"""jobs.plan_batches as a user runs it: a table, JSON, a picture, a config that trains, and one line for every mistake."""

import json
import subprocess
import sys

import numpy as np
import pytest

from dflash_ray.config.loading import load_config
from dflash_ray.data.store.dataset import Sample
from dflash_ray.data.store.writer import write_dataset
from jobs.plan_batches import main


@pytest.fixture
def lengths(tmp_path):
    np.save(tmp_path / "lengths.npy", np.random.default_rng(0).integers(20, 900, 3000).astype(np.int32))
    return tmp_path / "lengths.npy"


def test_table_json_picture_and_config(lengths, tmp_path, capsys):
    out = {name: tmp_path / name for name in ("out.json", "out.png", "out.yaml")}
    argv = ["--lengths", str(lengths), "--token-budget", "4096", "--json", str(out["out.json"]), "--plot", str(out["out.png"])]
    assert main([*argv, "--write-config", str(out["out.yaml"])]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("sorted", "random", "bucketed", "packed", "3,000 samples"))
    report = json.loads(out["out.json"].read_text())
    assert report["samples"] == 3000 and report["tokens"] == int(np.load(lengths).sum())
    assert set(report["strategies"]) == {"sorted", "random", "bucketed", "packed"}
    efficiency = {name: figures["padding_efficiency"] for name, figures in report["strategies"].items()}
    assert efficiency["packed"] == 1 > efficiency["sorted"] > efficiency["bucketed"] > efficiency["random"]
    edges = report["bucketed"]["edges"]
    assert edges[0] == 0 and edges[-1] == np.load(lengths).max() and len(edges) == 7
    assert report["optimizer"]["expected_efficiency"] == pytest.approx(efficiency["bucketed"], abs=0.02)
    assert sum(bucket["samples"] for bucket in report["bucketed"]["buckets"]) == 3000
    assert out["out.png"].read_bytes().startswith(b"\x89PNG")
    written = load_config([out["out.yaml"]]).batching
    assert written.edges == edges and written.token_budget == 4096


def test_given_edges_are_evaluated_not_searched(lengths, tmp_path):
    main(["--lengths", str(lengths), "--edges", "0,100,899", "--json", str(tmp_path / "a.json"), "--token-budget", "4096"])
    main(["--lengths", str(lengths), "--buckets", "2", "--json", str(tmp_path / "b.json"), "--token-budget", "4096"])
    given, searched = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    assert given["bucketed"]["edges"] == [0, 100, 899] and not given["optimizer"]["searched"]
    assert searched["strategies"]["bucketed"]["padding_efficiency"] > given["strategies"]["bucketed"]["padding_efficiency"]


def test_a_data_set_folder_brings_its_anchors(tmp_path):
    mask = np.zeros(100, np.uint8)
    mask[:3] = 1  # two candidates
    write_dataset(tmp_path / "data", {"train": [Sample(0, np.zeros(100, np.int32), mask)] * 9}, {})
    argv = ["--lengths", str(tmp_path / "data"), "--tokens-per-anchor", "10", "--token-budget", "300", "--json", str(tmp_path / "out.json")]
    assert main(argv) == 0
    assert json.loads((tmp_path / "out.json").read_text())["strategies"]["packed"]["anchors_max"] == 3 * 2


@pytest.mark.parametrize(
    "array, flags, words",
    [
        ([5, 5000], ["--token-budget", "4096"], ["sample 1 has 5000 tokens", "batching.token_budget"]),
        ([5, 0], [], ["from 0 to 5"]),
        ([1.5], [], ["float64"]),
        ([], [], ["float64 [0]"]),
        ([[1, 2]], [], ["[1, 2]"]),
        ([5, 9], ["--edges", "0,8"], ["last edge 8", "9"]),
        ([5, 9], ["--edges", "nine"], ["batching.edges", "nine"]),
        ([5, 9], ["--max-rows", "0"], ["batching.max_rows"]),
        ([5, 9], ["--json", "/nowhere/at/all.json"], ["/nowhere/at/all.json"]),
        ([5, 9], ["--plot", "picture.nothing"], ["picture.nothing"]),
    ],
)
def test_mistakes(tmp_path, array, flags, words):
    np.save(tmp_path / "lengths.npy", np.array(array))
    with pytest.raises(ValueError) as error:
        main(["--lengths", str(tmp_path / "lengths.npy"), *flags])
    assert all(word in str(error.value) for word in words)


def test_a_pickled_file_is_not_opened(tmp_path):
    np.save(tmp_path / "lengths.npy", np.array([1, None], object), allow_pickle=True)
    with pytest.raises(ValueError, match="neither a .npy file of whole numbers nor a data set folder"):
        main(["--lengths", str(tmp_path / "lengths.npy")])


def test_exit_code_and_one_line(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "jobs.plan_batches", "--lengths", str(tmp_path / "none.npy")], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.startswith("error: --lengths") and run.stderr.count("\n") == 1
