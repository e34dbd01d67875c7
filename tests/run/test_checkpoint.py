"""A checkpoint is whole or refused by name; whatever happens to the newest, the one before it is used."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dflash_ray.draft.trainer import DraftTrainer
from dflash_ray.run.checkpoint import list_checkpoints, newest_whole, prune, read_checkpoint, remove_leftovers, save_checkpoint
from tests.support.processes import ROOT
from tests.support.records import checkpoint_meta


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"model.a": torch.full((64, 8), float(step)), "optimizer.exp_avg.a": torch.arange(512.0).view(64, 8)}


def save(folder: Path, step: int, **meta) -> Path:
    return save_checkpoint(folder, tensors(step), checkpoint_meta(step, next_batch=2 * step, **meta))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


DAMAGE = {
    "torn meta": (lambda c: (c / "meta.json").write_bytes((c / "meta.json").read_bytes()[:40]), "meta.json cannot be read as JSON"),
    "no meta": (lambda c: (c / "meta.json").unlink(), "meta.json is missing"),
    "empty meta": (lambda c: (c / "meta.json").write_bytes(b""), "meta.json cannot be read as JSON"),
    "changed meta": (
        lambda c: (c / "meta.json").write_text((c / "meta.json").read_text().replace('"step": 3', '"step": 4')),
        "own digest",
    ),
    "truncated state": (lambda c: os.truncate(c / "state.safetensors", 100), "has 100 bytes instead of"),
    "no state": (lambda c: (c / "state.safetensors").unlink(), "state.safetensors is missing"),
    "flipped first bit": (lambda c: flip(c / "state.safetensors", 0), "does not match its digest"),
    "flipped last bit": (lambda c: flip(c / "state.safetensors", -1), "does not match its digest"),
    "grown state": (lambda c: (c / "state.safetensors").write_bytes((c / "state.safetensors").read_bytes() + b"\0"), "bytes instead of"),
    "another's state": (lambda c: save_file({"x": torch.zeros(3)}, c / "state.safetensors"), "bytes instead of"),
    "another program's": (lambda c: (c / "meta.json").write_text('{"step": 3}'), "was not written by this trainer"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used(tmp_path, case):
    save(tmp_path, 2)
    newest = save(tmp_path, 3)
    damage, named = DAMAGE[case]
    damage(newest)
    with pytest.raises(ValueError, match=named) as error:
        read_checkpoint(newest)
    assert str(newest) in str(error.value) and "\n" not in str(error.value)
    found, refused = newest_whole(tmp_path)
    assert found.step == 2 and len(refused) == 1 and newest.name in refused[0]
    assert torch.equal(found.tensors()["model.a"], tensors(2)["model.a"])


def test_a_copy_under_a_later_step_is_not_the_newest(tmp_path):
    save(tmp_path, 3)
    shutil.copytree(save(tmp_path, 2), tmp_path / "step-00000009")
    found, refused = newest_whole(tmp_path)
    assert found.step == 3 and len(refused) == 1 and "step-00000009: is that of step 2" in refused[0]


def test_every_bit_of_a_checkpoint_counts(tmp_path):
    path = save(tmp_path, 3)
    rng = random.Random(0)
    for name in ("meta.json", "state.safetensors"):
        whole = (path / name).read_bytes()
        for _ in range(200):
            changed = bytearray(whole)
            changed[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
            (path / name).write_bytes(bytes(changed))
            if name == "meta.json" and json_equal(whole, bytes(changed)):
                continue  # white space
            with pytest.raises(ValueError):
                read_checkpoint(path)
        (path / name).write_bytes(whole)
    read_checkpoint(path)


def json_equal(one: bytes, other: bytes) -> bool:
    try:
        return json.loads(one) == json.loads(other)
    except ValueError:
        return False


def test_a_save_that_cannot_be_written_leaves_what_was_there(tmp_path):
    """A limit on the size of files, kept by the kernel, stands for a full disk here; the disk itself fills in test_disk_full."""
    save(tmp_path, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError):
            save(tmp_path, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
    assert read_checkpoint(tmp_path / "step-00000002").step == 2


WRITER = """
import sys, torch
from pathlib import Path
from tests.support.records import checkpoint_meta
from dflash_ray.run.checkpoint import save_checkpoint
for step in range(1, 10_000):
    state = {"a": torch.full((1_000_000,), float(step))}
    save_checkpoint(Path(sys.argv[1]), state, checkpoint_meta(step))
    print(step, flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_the_last_whole_one(tmp_path):
    rng = random.Random(1)
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        process.stdout.readline()  # the first one is written, more are on their way
        time.sleep(rng.uniform(0, 0.08))  # the moment is meant to be any
        process.kill()
        told = 1 + len(process.stdout.read().split())
        process.wait(timeout=30)
        found, refused = newest_whole(folder)
        assert not refused and found.step in (told, told + 1)  # it may die between writing and saying so
        assert (found.tensors()["a"] == found.step).all()
        remove_leftovers(folder)
        assert sorted(folder.iterdir()) == list_checkpoints(folder)


def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    for step in range(1, 7):
        save(tmp_path, step)
    prune(tmp_path, 2, "step-00000003")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000003", "step-00000005", "step-00000006"]


def test_state_is_float32_and_another_run_s_state_is_refused(tmp_path):
    from dflash_ray.config.loading import validate
    from dflash_ray.run.build import make_trainer
    from dflash_ray.run.spec import resolve
    from dflash_ray.target.weights import embedding_and_head
    from tests.support.tiny_runs import tiny_config

    def trainer(**draft) -> DraftTrainer:
        config = validate(tiny_config(tmp_path / "material", tmp_path / "run", draft=draft))
        return make_trainer(resolve(config, device="cpu", run_dir=tmp_path / "run"), 10)

    one = trainer()
    state, meta = one.state_dict()
    assert meta["tables"] == embedding_and_head(one.config.target.path)[2]
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    with pytest.raises(ValueError, match="shape"):
        trainer(num_layers=2).load_state_dict(state, meta)
    with pytest.raises(ValueError, match="fingerprint None.*resume with the same target"):
        one.load_state_dict(state, {key: value for key, value in meta.items() if key != "tables"})
    for change, named in (
        (lambda s: s.pop("model.fc.weight"), "no tensor model.fc.weight"),
        (lambda s: s.update({"model.more": torch.zeros(1)}), "model.more is unknown"),
        (lambda s: s.update({"x": torch.zeros(1)}), "x is unknown"),
        (lambda s: s.update({"model.norm.weight": torch.zeros(3)}), "model.norm.weight is torch.float32"),
        (lambda s: s.update({"model.norm.weight": s["model.norm.weight"].bfloat16()}), "torch.bfloat16"),
        (lambda s: s.update({"optimizer.momentum.norm.weight": s["model.norm.weight"]}), "of another optimizer"),
    ):
        changed = dict(state)
        change(changed)
        with pytest.raises(ValueError, match=named):
            one.load_state_dict(changed, meta)


@pytest.mark.parametrize("entry", [{"batch": 4, "colour": "red"}, {"batch": 4, "sample_ids": "x", "reason": ""}, {"batch": -1}, {}])
def test_a_quarantined_batch_that_is_none_refuses_the_checkpoint_and_the_one_before_is_used(tmp_path, entry):
    save(tmp_path, 2)
    save(tmp_path, 3, set_aside=[entry])
    found, refused = newest_whole(tmp_path)
    assert found.step == 2 and "set_aside of meta.json is not a list of batches" in refused[0]
