"""What a user can get wrong is answered in one line with exit code 2, and nothing is written."""

from __future__ import annotations

import json
import shutil
import sys

import numpy as np
import pytest
import yaml

from dflash_ray.data.store.writer import DatasetWriter
from jobs import train
from jobs.support import cli
from tests.support.tiny_runs import MASK_TOKEN, tiny_config, tiny_dataset
from tests.support.tiny_targets import VOCAB


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    folder = tmp_path_factory.mktemp("material")
    return folder, tiny_config(folder, folder / "run")


def refused(argv, capsys, monkeypatch) -> str:
    """The one line on stderr of a command that must exit with 2."""
    monkeypatch.setattr(sys, "argv", ["train", *argv])
    with pytest.raises(SystemExit) as exit_:
        cli.run(train.main)
    error = capsys.readouterr().err
    assert exit_.value.code == 2, error
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error


CASES = {
    "unknown key": (["--optimizer.learning_rate", "1"], "optimizer.learning_rate: no such setting"),
    "close key": (["--optimzer.lr", "1"], "did you mean optimizer.lr"),
    "no value": (["--optimizer.lr"], "a value is missing"),
    "no value of a short flag": (["--resume"], "--resume: a value is missing"),
    "a value for a switch": (["--fresh=yes"], "--fresh takes no value"),
    "given twice": (["--resume", "auto", "--resume", "never"], "--resume is given 2 times; give it once"),
    "abbreviated": (["--dry"], "--dry: no such setting"),
    "negative": (["--optimizer.lr", "-1e-3"], "optimizer.lr: Input should be greater than 0 (got '-1e-3')"),
    "not a flag": (["optimizer.lr=3"], "is not a flag"),
    "wrong type": (["--optimizer.lr", "fast"], "optimizer.lr"),
    "tap on the last layer": (["--draft.target_layer_ids", "1,7"], "7 is the last layer of a 8-layer target"),
    "tap out of range": (["--draft.target_layer_ids", "1,99"], "99"),
    "tap repeated": (["--draft.target_layer_ids", "2,2"], "draft.target_layer_ids"),
    "tap negative": (["--draft.target_layer_ids", "[-1, 2]"], "-1"),
    "mask is pad": (["--draft.mask_token_id", "0"], "pad"),
    "mask is eos": (["--draft.mask_token_id", "1"], "eos"),
    "mask out of range": (["--draft.mask_token_id", str(VOCAB)], f"0..{VOCAB - 1}"),
    "two drafters": (["--topology", "2-2"], "2 drafters"),
    "no drafter": (["--topology", "2-0"], "0 drafters"),
    "no target": (["--topology", "0-1"], "no target"),
    "topology of words": (["--topology", "many"], "TARGETS-DRAFTERS"),
    "missing target": (["--target.path", "/no/such/folder"], "/no/such/folder"),
    "missing data": (["--data.path", "/no/such/folder"], "/no/such/folder"),
    "missing config": (["--config", "/no/such/file.yaml"], "no such file"),
    "missing checkpoint": (["--resume", "/no/such/checkpoint"], "no such folder"),
    "fresh and resume": (["--fresh", "--resume", "auto"], "give one of them"),
    "float16": (["--target.precision", "float16"], "target.precision"),
    "no loss": (["--loss.dpace", "0"], "loss"),
    "sliding without window": (["--draft.layer_types", "[sliding_attention]"], "sliding_window"),
    "rows without end": (["--batching.max_rows", "100000"], "batching.max_rows"),
    "sample over the budget": (["--batching.token_budget", "30"], "batching.token_budget"),
    "warm start from nowhere": (["--draft.init", "/no/such/drafter"], "draft.init"),
    "block of one": (["--draft.block_size", "1"], "draft.block_size"),
    "not a number": (["--optimizer.lr", "nan"], "optimizer.lr"),
    "run folder below a file": (["--run.dir", f"{__file__}/run"], "is a file"),
    "run folder is a file": (["--run.dir", __file__], "is a file"),
    "run folder nobody can make": (["--run.dir", "/tmp/" + "x" * 300], "run.dir"),
    "path with a NUL": (["--run.dir", "a\0b"], "NUL"),
    "epochs without end": (["--train.epochs", "1000000000"], "train.epochs"),
    "power from nowhere": (["--power.source", "file:/no/such"], "power.source"),
    "result into no folder": (["--json", "/no/such/out.json"], "--json /no/such/out.json: cannot be written"),
    "result into a folder": (["--dry-run", "--json", "/"], "--json /: cannot be written"),
    "warm start from no drafter": (["--draft.init", "/usr"], "draft.init /usr: no config.json"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_nothing_written(case, material, capsys, monkeypatch, tmp_path):
    folder, tree = material
    flags, named = CASES[case]
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    error = refused(["--config", str(config), *flags], capsys, monkeypatch)
    assert named in error
    assert not (folder / "run").exists()


def test_a_ray_that_does_not_start_is_one_line_and_a_failure(material, capsys, monkeypatch, tmp_path):
    import ray

    def late(**_settings):
        raise Exception("The current node timed out during startup.\nMore words.")

    monkeypatch.setattr(ray, "init", late)
    monkeypatch.setattr(sys, "argv", ["train", "--config", str(tmp_path / "config.yaml")])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(material[1]))
    with pytest.raises(SystemExit) as exit_:
        cli.run(train.main)
    assert exit_.value.code == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: ")]
    assert lines == ["failed: no Ray: The current node timed out during startup."]


@pytest.mark.parametrize(
    "text",
    ["a: [1", "- 1\n- 2", "run: 3", "run:\n  name: ../../etc", "topology: {a: 1}", "run: {seed: -1}", "\x00", "&a [*a]", "run: {name: ''}"],
)
def test_config_files_that_are_none(text, capsys, monkeypatch, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(text)
    refused(["--config", str(config)], capsys, monkeypatch)


def test_a_dataset_without_a_supervised_token(material, capsys, monkeypatch, tmp_path):
    folder, tree = material
    import pyarrow as pa

    data = tmp_path / "data"
    tiny_dataset(data, documents=3)
    shard = data / "train" / "00000.arrow"
    table = pa.ipc.open_file(shard.read_bytes()).read_all()
    nothing = pa.array([np.zeros(n, np.uint8).tolist() for n in table["seq_len"].to_pylist()], pa.list_(pa.uint8()))
    table = table.set_column(table.schema.get_field_index("loss_mask"), table.schema.field("loss_mask"), nothing)
    table = table.set_column(
        table.schema.get_field_index("anchor_candidates"), table.schema.field("anchor_candidates"), pa.array([0] * 3, pa.int32())
    )
    with pa.OSFile(str(shard), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    error = refused(["--config", str(config), "--data.path", str(data)], capsys, monkeypatch)
    assert "supervised" in error
    assert not (folder / "run").exists()


def test_data_of_another_tokenizer(material, capsys, monkeypatch, tmp_path):
    _, tree = material
    with DatasetWriter(tmp_path / "data") as writer:
        writer.add("train", [1, 2, 3, 4], [0, 1, 1, 1])
        writer.finish({"vocab_size": VOCAB + 1})
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    assert "tokenizer" in refused(["--config", str(config), "--data.path", str(tmp_path / "data")], capsys, monkeypatch)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_sample_beyond_the_targets_positions(split, material, capsys, monkeypatch, tmp_path):
    folder, tree = material
    with DatasetWriter(tmp_path / "data") as writer:
        for name in ("train", "validation"):
            length = 2049 if name == split else 8
            writer.add(name, np.full(length, 5), np.arange(length) > 3)
        writer.finish({"vocab_size": VOCAB})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    flags = ["--config", str(tmp_path / "config.yaml"), "--data.path", str(tmp_path / "data"), "--batching.token_budget", "4096"]
    assert "2049 tokens is longer than the target's 2048 positions" in refused(flags, capsys, monkeypatch)
    assert not (folder / "run").exists()


def test_data_that_holds_the_mask_token(material, capsys, monkeypatch, tmp_path):
    folder, tree = material
    with DatasetWriter(tmp_path / "data") as writer:
        writer.add("train", [1, MASK_TOKEN, 3, 4], [0, 1, 1, 1])
        writer.finish({"vocab_size": VOCAB, "counts": {"added_tokens": {str(MASK_TOKEN): 1, "4": 1}}})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    flags = ["--config", str(tmp_path / "config.yaml"), "--data.path", str(tmp_path / "data")]
    for more in ([], ["--dry-run"]):
        assert f"draft.mask_token_id: {MASK_TOKEN} occurs 1 times" in refused([*flags, *more], capsys, monkeypatch)
    assert not (folder / "run").exists()


def test_relative_paths_under_job_submit(material, capsys, monkeypatch, tmp_path):
    _, tree = material
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    for key in ("run.dir", "data.path", "target.path", "json"):
        for more in ([], ["--dry-run"]):
            error = refused(["--config", str(config), f"--{key}", "somewhere", *more], capsys, monkeypatch)
            assert key in error and "absolute path" in error


def test_a_target_that_is_broken(material, capsys, monkeypatch, tmp_path):
    folder, tree = material
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    for name, change in {
        "no theta": lambda c: c["rope_parameters"].pop("rope_theta"),
        "unknown family": lambda c: c.update(model_type="gpt_neo"),
        "no hidden size": lambda c: c.pop("hidden_size"),
    }.items():
        broken = tmp_path / name.replace(" ", "-")
        shutil.copytree(folder / "target", broken)
        values = json.loads((broken / "config.json").read_text())
        change(values)
        (broken / "config.json").write_text(json.dumps(values))
        assert "target.path" in refused(["--config", str(config), "--target.path", str(broken)], capsys, monkeypatch)
    assert not (folder / "run").exists()


def test_dry_run_writes_nothing(material, capsys, monkeypatch, tmp_path):
    folder, tree = material
    config, out = tmp_path / "config.yaml", tmp_path / "out.json"
    config.write_text(yaml.safe_dump(tree))
    monkeypatch.setattr(sys, "argv", ["train", "--config", str(config), "--dry-run", "--json", str(out)])
    with pytest.raises(SystemExit) as exit_:
        cli.run(train.main)
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert "trainable parameters" in shown and "object store" in shown
    report = json.loads(out.read_text())
    assert report["exact"] and report["samples"] == 40 and report["config"]["draft"]["mask_token_id"] == MASK_TOKEN
    assert not (folder / "run").exists()


def test_dry_run_explains_the_real_configuration(capsys):
    from pathlib import Path

    configs = Path(train.__file__).parent / "configs"
    assert train.main(["--config", str(configs / "qwen3.6-27b.yaml"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "1,730,213,120" in shown and "839 MB" in shown and "of 141 GiB on a GPU: a target 52.6, the drafter 40.5 GiB" in shown
    bucketed = ["--config", str(configs / "qwen3.6-27b-bucketed.yaml"), "--dry-run", "--hardware.gpu_memory_gib"]
    assert train.main([*bucketed, "96"]) == 0
    with pytest.raises(ValueError, match="a drafter needs .* GiB"):
        train.main([*bucketed, "96", "--anchors.tokens_per_anchor", "8"])
    with pytest.raises(ValueError, match="a target needs .* GiB"):
        train.main([*bucketed, "48"])


@pytest.mark.parametrize("name", ["summary.json", "evaluation.json"])
def test_a_quickstart_folder_that_is_damaged(name, capsys, monkeypatch, tmp_path):
    from jobs.quickstart import run as quickstart_run

    for folder in ("data", "export"):
        (tmp_path / folder).mkdir()
    (tmp_path / "data" / "manifest.json").write_text("{}")
    (tmp_path / "export" / "config.json").write_text("{}")
    (tmp_path / "summary.json").write_text('{"finished": true}')
    (tmp_path / name).write_text("{")
    monkeypatch.setattr(sys, "argv", ["quickstart", "--run", str(tmp_path)])
    with pytest.raises(SystemExit) as exit_:
        cli.run(quickstart_run.main)
    assert exit_.value.code == 2
    assert f"error: {tmp_path / name}: cannot be read as JSON" in capsys.readouterr().err


def test_a_fresh_quickstart_leaves_a_run_at_work_alone(capsys, monkeypatch, tmp_path):
    from dflash_ray.run.folder import RunFolder
    from jobs.quickstart import run as quickstart_run

    other = RunFolder(tmp_path)
    assert other.lock()
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    monkeypatch.setattr(sys, "argv", ["quickstart", "--fresh", "--run", str(tmp_path)])
    with pytest.raises(SystemExit) as exit_:
        cli.run(quickstart_run.main)
    other.unlock()
    assert exit_.value.code == 2
    assert "another run writes" in capsys.readouterr().err and (tmp_path / "metrics.jsonl").exists()


def test_more_targets_than_a_machine_without_gpus_can_start(material, capsys, monkeypatch, tmp_path):
    from jobs.support import run_driver

    monkeypatch.setattr(run_driver, "connect", lambda: None)
    monkeypatch.setattr(run_driver.ray, "cluster_resources", lambda: {"memory": 16e9, "CPU": 2.0})
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(material[1]))
    monkeypatch.setattr(sys, "argv", ["train", "--config", str(config), "--topology", "999-1"])
    with pytest.raises(SystemExit) as exit_:
        cli.run(train.main)
    assert exit_.value.code == 2
    assert "1,002 processes x 0.3 GB = 300.6 GB" in capsys.readouterr().err
    assert not (material[0] / "run").exists()
