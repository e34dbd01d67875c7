"""The doctor: each thing that can be wrong is found, called by its level, and comes with what to do."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from dflash_ray.config.loading import validate
from dflash_ray.data.prepare.tokenizer import ChatTokenizer
from dflash_ray.doctor import cluster, machine, memory_and_disk, target_and_data
from dflash_ray.doctor.finding import Finding
from dflash_ray.doctor.machine import GIB, GpuUse
from dflash_ray.doctor.which_checks import machine_findings, quick_findings, refuse_blockers
from dflash_ray.planning.memory import run_memory
from dflash_ray.run.spec import resolve
from jobs import doctor, train
from jobs.support import cli
from tests.support.processes import ROOT
from tests.support.tiny_runs import tiny_config


@pytest.fixture
def spec(tmp_path):
    return resolve(validate(tiny_config(tmp_path / "material", tmp_path / "run")), device="cpu", run_dir=tmp_path / "run")


def assert_found(finding: Finding, level: str, *words: str) -> None:
    assert finding.level == level, finding
    assert all(word in f"{finding.what} {finding.do}" for word in words), finding


def test_compiler(tmp_path):
    assert_found(machine.compiler(False), "n/a")
    if shutil.which("gcc"):
        assert_found(machine.compiler(True), "ok", "gcc")
    assert_found(machine.compiler(True, {"CC": "/no/such/compiler"}), "blocker", "does not run", "CC")
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'one.c:1:10: fatal error: Python.h: No such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    assert_found(machine.compiler(True, {"CC": str(broken)}), "blocker", "Python.h", "headers")
    broken.write_text("#!/bin/sh\necho 'error: linker ld not found' >&2\nexit 1\n")
    assert_found(machine.compiler(True, {"CC": str(broken)}), "blocker", "ld not found")


def test_triton_is_the_one_that_torch_names():
    names = ["numpy", "triton==3.7.1; platform_system == 'Linux'", "triton==9; extra == 'other'"]
    assert_found(machine.triton_version(True, "3.7.1", names), "ok", "==3.7.1")
    assert_found(machine.triton_version(True, "3.6.0", names), "blocker", "pip install 'triton==3.7.1'")
    assert_found(machine.triton_version(True, None, names), "blocker", "not installed")
    assert_found(machine.triton_version(True, "3.6.0", ["numpy"]), "ok")
    assert_found(machine.triton_version(False, None, names), "n/a")


def test_driver_and_torch():
    assert_found(machine.driver(0, None, None, False, "2.13"), "n/a", "CPU")
    assert_found(machine.driver(8, None, "13.0", False, "2.13+cpu"), "blocker", "CPU build", "CUDA build")
    assert_found(machine.driver(8, "13.0", "12.4", False, "2.13"), "blocker", "13.0", "12.4", "update")
    assert_found(machine.driver(8, "13.0", "13.0", True, "2.13"), "ok")


def test_gpus_free():
    idle = [GpuUse(i, "H200", GIB // 2, 139 * GIB) for i in range(7)]
    busy = GpuUse(7, "H200", 60 * GIB, 139 * GIB, (4711,))
    assert_found(machine.gpus_free([*idle, busy], 7, "6-1"), "ok", "7 of 8")
    assert_found(machine.gpus_free([*idle, busy], 8, "7-1"), "blocker", "GPU 7", "4711", "60.0 of 139")
    assert_found(machine.gpus_free(idle[:4], 7, "6-1"), "warning", "--topology 3-1")
    assert_found(machine.gpus_free([], 7, "6-1"), "n/a")


def test_packages_have_the_versions_that_the_project_asks_for():
    assert_found(machine.packages(), "ok")
    assert_found(machine.packages(dict.fromkeys(machine.LEAST, "99") | {"torch": "2.10.1"}), "blocker", "torch 2.10.1", "2.11")
    assert_found(machine.packages(dict.fromkeys(machine.LEAST, "99") | {"ray": None}), "blocker", "ray missing")
    asked = [Requirement(text) for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]]
    floors = {one.name: next(iter(one.specifier)).version for one in asked}
    assert {name: floors[name] for name in machine.LEAST} == machine.LEAST and floors["wandb"] == machine.LEAST_WANDB


def test_wandb():
    assert_found(machine.tracking("none", None, {}, False), "n/a")
    assert_found(machine.tracking("wandb", "0.22.1", {"WANDB_API_KEY": "x"}, False), "warning", "0.27")
    assert_found(machine.tracking("wandb", None, {}, False), "warning", "pip install")
    assert_found(machine.tracking("wandb", "0.31.0", {}, False), "warning", "offline", "wandb login")
    assert_found(machine.tracking("wandb", "0.31.0", {}, True), "ok")


def test_ray_authentication(tmp_path):
    token = tmp_path / "auth_token"
    assert_found(cluster.authentication({}, [], token), "warning", "export RAY_AUTH_MODE=token")
    assert_found(cluster.authentication({"RAY_AUTH_MODE": "token"}, [], token), "warning", "get-auth-token")
    token.write_text("secret")
    found = cluster.authentication({"RAY_AUTH_MODE": "token"}, [], token)
    assert_found(found, "ok", str(token))
    assert "secret" not in found.what
    assert_found(cluster.authentication({"RAY_AUTH_MODE": "token"}, [{}], token), "warning", "unset at a head")
    assert_found(cluster.authentication({}, [{"RAY_AUTH_MODE": "token"}], token), "warning", "export RAY_AUTH_MODE=token")


def test_time_to_stop():
    assert_found(cluster.stop_wait([]), "n/a")
    assert_found(cluster.stop_wait([{}]), "warning", "3 s", "RAY_JOB_STOP_WAIT_TIME_S=120")
    assert_found(cluster.stop_wait([{"RAY_JOB_STOP_WAIT_TIME_S": "120"}]), "ok")


def test_a_target_folder_is_looked_at_to_the_last_byte(spec):
    path = spec.config.target.path
    assert_found(target_and_data.target_folder(spec), "warning", "tokenizer")  # the tiny target has none
    (path / "tokenizer.json").write_text("{}")
    assert_found(target_and_data.target_folder(spec), "ok")
    weights = next(path.glob("*.safetensors"))
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert_found(target_and_data.target_folder(spec), "blocker", "copy or download")
    weights.unlink()
    assert_found(target_and_data.target_folder(spec), "blocker", "no model.safetensors")


def test_a_sharded_target_that_lacks_a_tensor_or_a_piece(spec):
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = spec.config.target.path
    with safe_open(path / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    (path / "model.safetensors").unlink()
    (path / "tokenizer.json").write_text("{}")
    first, second = dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])
    index = {"weight_map": {name: "a.safetensors" if name in first else "b.safetensors" for name in tensors}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(first, path / "a.safetensors")
    save_file(second, path / "b.safetensors")
    assert_found(target_and_data.target_folder(spec), "ok", "2 files")
    (path / "b.safetensors").write_bytes((path / "b.safetensors").read_bytes()[:-4])
    assert_found(target_and_data.target_folder(spec), "blocker", "b.safetensors is not whole")
    lost = min(second)
    save_file({name: tensor for name, tensor in second.items() if name != lost}, path / "b.safetensors")
    assert_found(target_and_data.target_folder(spec), "blocker", f"lacks {lost}")
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if ".layers.3." not in name}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(second, path / "b.safetensors")
    if spec.shape.target_layer_ids[-1] >= 3:
        assert_found(target_and_data.target_folder(spec), "blocker", "layers.3")


def test_data_of_another_tokenizer(spec):
    assert_found(target_and_data.data(spec), "warning", "does not say which tokenizer")
    manifest = spec.config.data.path / "manifest.json"
    told = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(told | {"vocab_size": 10**6}))
    assert_found(target_and_data.data(spec), "blocker", "tokenizer of 1000000 tokens", "prepare")
    tree = spec.config.as_dict() | {"target": {"path": str(ROOT / "jobs" / "quickstart" / "target")}}
    other = resolve(validate(tree), device="cpu", run_dir=spec.run_dir)
    manifest.write_text(json.dumps(told | {"tokenizer": "f00d"}))
    assert_found(target_and_data.data(other), "blocker", "another tokenizer (f00d)", "prepare")
    manifest.write_text(json.dumps(told | ChatTokenizer(other.config.target.path).fingerprint()))
    assert_found(target_and_data.data(other), "ok")


def test_room_on_disk(tmp_path):
    assert_found(memory_and_disk.disk(tmp_path / "not" / "yet", 10, 3, free=19), "blocker", "not even two fit")
    assert_found(memory_and_disk.disk(tmp_path, 10, 3, free=49), "warning", "checkpoint.keep 3", "run.dir")
    assert_found(memory_and_disk.disk(tmp_path, 10, 3, free=50), "ok")
    assert_found(memory_and_disk.disk(tmp_path, 10, 3), "ok")


def test_room_in_shared_memory(spec):
    memory = run_memory(spec, 128, 40)
    message, window = memory.message.bytes, memory.window.bytes
    assert_found(memory_and_disk.shared_memory(memory, message, 10**12), "blocker", "one batch's features", "--shm-size")
    assert_found(memory_and_disk.shared_memory(memory, window, 10**12), "warning", "less will be in flight")
    assert_found(memory_and_disk.shared_memory(memory, 100 * window, 2 * window), "warning", "--object-store-memory=")
    assert_found(memory_and_disk.shared_memory(memory, 100 * window, 10**12), "ok")


def test_room_on_a_gpu(spec):
    memory = run_memory(spec, 128, 40)
    assert_found(memory_and_disk.gpu_memory(spec, memory, None), "n/a")
    assert_found(memory_and_disk.gpu_memory(spec, memory, 1000), "blocker", "GiB", "lower batching.token_budget")
    assert_found(memory_and_disk.gpu_memory(spec, memory, 10**12), "ok")


def test_a_machine_without_a_gpu_is_no_reason_to_stop(spec):
    if machine_gpus():
        pytest.skip("this machine has a GPU")
    found = {one.check: one.level for one in machine_findings(spec, "none", "2-1", 3)}
    assert "blocker" not in found.values()
    assert found["Triton backend"] == found["C compiler"] == found["GPUs free"] == found["FLA fast path"] == "n/a"


def machine_gpus() -> int:
    from dflash_ray.doctor.which_checks import gpu_uses

    return len(gpu_uses()[0])


def test_the_quick_checks_stop_a_run_and_warn(spec):
    found = refuse_blockers(quick_findings(spec, gpus=False))
    assert [one.check for one in found] == ["target folder"]
    weights = next(spec.config.target.path.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match="target folder: .*copy or download"):
        refuse_blockers(quick_findings(spec, gpus=False))


def write_config(tmp_path: Path, **sections) -> list[str]:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tiny_config(tmp_path / "material", tmp_path / "run", **sections)))
    return ["--config", str(path)]


def test_the_job_says_what_to_do_and_exits_with_1_on_a_blocker(tmp_path, capsys):
    flags = write_config(tmp_path)
    assert doctor.main([*flags, "--json", str(tmp_path / "found.json")]) == 0
    assert "0 blockers" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert {"target folder", "data and tokenizer", "/dev/shm", "disk for checkpoints", "packages"} <= {one["check"] for one in found}
    assert all(one["do"] for one in found if one["level"] in ("warning", "blocker"))
    weights = next((tmp_path / "material" / "target").glob("*.safetensors"))
    os.truncate(weights, weights.stat().st_size - 1)
    assert doctor.main(flags) == 1
    said = capsys.readouterr().out
    assert "1 blocker" in said and "-> copy or download the folder again" in said
    assert not (tmp_path / "run").exists()


def test_training_refuses_what_the_quick_checks_find(tmp_path, capsys, monkeypatch):
    flags = write_config(tmp_path)
    weights = next((tmp_path / "material" / "target").glob("*.safetensors"))
    os.truncate(weights, weights.stat().st_size - 1)
    monkeypatch.setattr(sys, "argv", ["train", *flags])
    with pytest.raises(SystemExit) as ended:
        cli.run(train.main)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "error: target folder: " in said and "copy or download" in said
    assert not (tmp_path / "run").exists()


def test_a_setting_that_is_wrong_is_a_blocker_and_a_machine_alone_can_be_looked_at(tmp_path, capsys):
    assert doctor.main([*write_config(tmp_path), "--draft.mask_token_id", "0"]) == 1
    assert "draft.mask_token_id" in capsys.readouterr().out
    assert doctor.main([]) == 0
    assert "only the machine" in capsys.readouterr().out
