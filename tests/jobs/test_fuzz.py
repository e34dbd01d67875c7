"""Hostile and broken files: every reader answers with what it read or with one ValueError of one line. Never another exception, never a
hang; nothing is written, started or unpickled by reading."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from dflash_ray.config.loading import load_config
from dflash_ray.data.store.dataset import open_dataset
from dflash_ray.draft.dflash.export import load_drafter
from dflash_ray.draft.dflash.shape import resolve_shape
from dflash_ray.draft.trainer import DraftTrainer
from dflash_ray.run.checkpoint import newest_whole, read_checkpoint, save_checkpoint
from dflash_ray.run.exports import choose_checkpoint
from dflash_ray.run.folder import RunFolder
from dflash_ray.target.shape import read_target_shape, resolve_mask_token
from dflash_ray.target.weights import WeightFiles, embedding_and_head
from tests.support.records import checkpoint_meta
from tests.support.tiny_runs import tiny_config, tiny_dataset

NASTY = [
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308, float("inf"), float("nan"), "", "0", "x", "a\0b",
    "../../../etc/passwd", "/etc/passwd", "~", "é" * 50, "\ud800", "1" * 5000, [], [[]], {}, [1, "a", None], {"a": {"b": []}},
    [0] * 2000, "auto",
]  # fmt: skip


FORBIDDEN = (
    "pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.remove", "os.rename", "os.mkdir", "socket.connect",
)  # fmt: skip


def spoil_tree(tree: Any, rng: random.Random) -> Any:
    """A copy in which one to three values are replaced, removed or added, anywhere."""
    tree = json.loads(json.dumps(tree))
    for _ in range(rng.randint(1, 3)):
        node = tree
        while isinstance(node, dict | list) and node:
            key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
            if rng.random() < 0.5 and isinstance(node[key], dict | list) and node[key]:
                node = node[key]
                continue
            deed = rng.random()
            if deed < 0.75:
                node[key] = deepcopy(rng.choice(NASTY))
            elif deed < 0.9:
                del node[key]
            elif isinstance(node, dict):
                node[rng.choice(["", "x", "__class__", "batch", "\0"])] = deepcopy(rng.choice(NASTY))
            break
    return tree


def spoil_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bits flipped, ends cut off, pieces doubled, moved or replaced."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if not out:
            return bytes(out)
        at, deed = rng.randrange(len(out)), rng.random()
        if deed < 0.4:
            out[at] ^= 1 << rng.randrange(8)
        elif deed < 0.55:
            del out[at:]
        elif deed < 0.7:
            piece = out[at : at + rng.randint(1, 40)]
            out[at:at] = piece * rng.randint(1, 3)
        elif deed < 0.85:
            out[at : at + rng.randint(1, 8)] = rng.randbytes(rng.randint(0, 9))
        else:
            out[at : at + 1] = rng.choice([b"\xff", b"\0", b"[" * 3000, b"{", b'"', b"&a [*a]", b"!!int ", b"!!python/object:os.system "])
    return bytes(out)


def spoil_json(tree: Any, rng: random.Random) -> bytes:
    text = json.dumps(spoil_tree(tree, rng)).encode("utf-8", "surrogatepass")
    return spoil_bytes(text, rng) if rng.random() < 0.3 else text


class Watch:
    """What reading must never do, seen by Python's own audit events."""

    def __init__(self) -> None:
        self.on, self.seen = False, []
        sys.addaudithook(self._look)

    def _look(self, event: str, args: tuple) -> None:
        if not self.on:
            return
        if event == "open" and isinstance(args[2], int) and args[2] & 0o3 and str(args[0]) != "/dev/null":
            self.seen.append((event, args[0]))
        if event in FORBIDDEN:
            self.seen.append((event, args))


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


def attack(watch: Watch, read: Callable[[], object], spoil: Callable[[random.Random], object], inputs: int, seed: str) -> tuple[int, int]:
    """Reads `inputs` spoilt files. Returns how many were accepted and how many refused."""
    accepted = refused = 0
    for number in range(inputs):
        spoil(random.Random(f"{seed} {number}"))
        watch.on, watch.seen = True, []
        try:
            read()
            accepted += 1
        except ValueError as error:
            refused += 1
            assert str(error).strip(), f"input {number}: an empty message"
            assert not isinstance(error, UnicodeError), f"input {number}: {error!r}"
        except Exception as error:
            raise AssertionError(f"{seed}, input {number}: {type(error).__name__}: {error}") from error
        finally:
            watch.on = False
        assert not watch.seen, f"{seed}, input {number}: {watch.seen}"
    return accepted, refused


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> tuple[Path, dict]:
    from tests.support.tiny_targets import save_tokenizer

    folder = tmp_path_factory.mktemp("material")
    tree = tiny_config(folder, folder / "run")
    save_tokenizer(folder / "target")
    return folder, tree


SIZES = pytest.mark.parametrize("size", [1, pytest.param(30, marks=pytest.mark.slow)])


@SIZES
def test_config_files(material, watch, tmp_path, size):
    _, tree = material
    path, text = tmp_path / "config.yaml", yaml.safe_dump(tree).encode()

    def spoil(rng: random.Random) -> None:
        if rng.random() < 0.5:
            path.write_bytes(spoil_bytes(text, rng))
        else:
            path.write_text(json.dumps(spoil_tree(tree, rng)))

    accepted, refused = attack(watch, lambda: load_config([path]), spoil, 150 * size, "config")
    assert accepted and refused


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(20)),
        "run: {seed: " + "9" * 5000 + "}",
        "run: {name: !!int ''}",
        "run: {name: !!timestamp x}",
        "run: {name: !!bool maybe}",
        "run: {name: !!binary '=='}",
        "run: {name: 2026-13-45}",
        "!!python/object/apply:os.system ['touch escaped']",
        "[" * 50_000,
        "run: &r {dir: *r}",
        "data: &d {columns: {input_ids: *d}}",
        "? [1, 2]\n: 3",
    ],
    ids=range(12),
)
def test_config_files_that_would_hang_or_run(watch, tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert attack(watch, lambda: load_config([path]), lambda _: None, 1, text[:20]) == (0, 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.yaml"]


@SIZES
def test_dataset_manifests_and_shards(watch, tmp_path, size):
    data = tiny_dataset(tmp_path / "data", documents=6)
    manifest, shard = data / "manifest.json", data / "train" / "00000.arrow"
    tree, whole = json.loads(manifest.read_text()), shard.read_bytes()

    def spoil(rng: random.Random) -> None:
        manifest.write_bytes(spoil_json(tree, rng) if rng.random() < 0.4 else json.dumps(tree).encode())
        shard.write_bytes(spoil_bytes(whole, rng) if rng.random() < 0.6 else whole)

    def read() -> None:
        dataset = open_dataset(data)
        dataset.read(range(len(dataset)))

    accepted, refused = attack(watch, read, spoil, 150 * size, "dataset")
    assert accepted and refused


@SIZES
def test_target_folders(material, watch, tmp_path, size):
    folder = tmp_path / "target"
    shutil.copytree(material[0] / "target", folder)
    names = ["config.json", "tokenizer.json", "tokenizer_config.json"]
    trees = {name: json.loads((folder / name).read_text()) for name in names}
    trees["generation_config.json"] = {"eos_token_id": [1, 2]}

    def spoil(rng: random.Random) -> None:
        chosen = rng.choice(list(trees))
        for name, tree in trees.items():
            (folder / name).write_bytes(spoil_json(tree, rng) if name == chosen else json.dumps(tree).encode())

    def read() -> None:
        read_target_shape(folder)
        resolve_mask_token(folder, None)
        resolve_shape(load_config([], ["--draft.num_taps", "2"]).draft.model_copy(update={"mask_token_id": 5}), read_target_shape(folder))

    accepted, refused = attack(watch, read, spoil, 100 * size, "target")
    assert accepted and refused


def spoil_safetensors(whole: bytes, rng: random.Random) -> bytes:
    """Anything, with an eye on the header: its length, its JSON, its offsets."""
    (length,) = struct.unpack("<Q", whole[:8])
    header, body = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    deed = rng.random()
    if deed < 0.6:
        text = spoil_json(header, rng)
        return struct.pack("<Q", len(text) if rng.random() < 0.8 else rng.choice([0, 1, 2**63, 2**64 - 1, len(whole)])) + text + body
    return spoil_bytes(whole, rng) if deed < 0.9 else whole[: rng.randrange(len(whole))]


@SIZES
def test_target_weights(watch, tmp_path, size):
    from tests.support.tiny_targets import save_target

    folder = tmp_path / "target"
    save_target("qwen3", folder, layers=1)
    path, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    whole = path.read_bytes()
    tree = {"metadata": {}, "weight_map": dict.fromkeys(load_file(path), path.name)}

    def spoil(rng: random.Random) -> None:
        path.write_bytes(spoil_safetensors(whole, rng) if rng.random() < 0.7 else whole)
        index.unlink(missing_ok=True)
        if rng.random() < 0.5:
            index.write_bytes(spoil_json(tree, rng))

    def read() -> None:
        checkpoint = WeightFiles(folder)
        checkpoint.read("layers.0.input_layernorm.weight")
        embedding_and_head(folder)

    accepted, refused = attack(watch, read, spoil, 100 * size, "weights")
    assert accepted and refused


@pytest.fixture(scope="module")
def trainer(material) -> tuple[DraftTrainer, torch.Tensor]:
    from dflash_ray.config.loading import validate
    from dflash_ray.run.spec import resolve

    folder, tree = material
    spec = resolve(validate(tree), device="cpu", run_dir=folder / "run")
    embed, head, _ = embedding_and_head(folder / "target")
    return DraftTrainer(spec.config, spec.shape, embed, head, "cpu", 10), embed


@SIZES
def test_exported_drafters(trainer, watch, tmp_path, size):
    from dflash_ray.draft.dflash.export import export_drafter
    from dflash_ray.draft.trainer import serving_weights

    one, embed = trainer
    folder = tmp_path / "drafter"
    export_drafter(serving_weights(one.state_dict()[0]), one.shape, folder)
    tree, whole = json.loads((folder / "config.json").read_text()), (folder / "model.safetensors").read_bytes()

    def spoil(rng: random.Random) -> None:
        both = rng.random() < 0.2
        (folder / "config.json").write_bytes(spoil_json(tree, rng) if both or rng.random() < 0.6 else json.dumps(tree).encode())
        (folder / "model.safetensors").write_bytes(spoil_safetensors(whole, rng) if both or rng.random() < 0.4 else whole)

    accepted, refused = attack(watch, lambda: load_drafter(folder, embed, embed), spoil, 100 * size, "drafter")
    assert accepted and refused


@SIZES
def test_checkpoints(trainer, watch, tmp_path, size):
    """With the digest as it was, and with one that fits, as a hostile writer would make it."""
    one, _ = trainer
    tensors, inner = one.state_dict()
    meta = checkpoint_meta(3, next_batch=6, best_tau=1.5, best_name="step-00000003", weights="5eed", trainer=inner)
    run = RunFolder(tmp_path / "run")
    path = save_checkpoint(run.checkpoints, tensors, meta)
    tree, whole = json.loads((path / "meta.json").read_text()), (path / "state.safetensors").read_bytes()

    def spoil(rng: random.Random) -> None:
        state = spoil_safetensors(whole, rng) if rng.random() < 0.4 else whole
        (path / "state.safetensors").write_bytes(state)
        written = json.dumps(spoil_tree(tree, rng) if rng.random() < 0.7 else tree)
        try:
            changed = json.loads(written)
            if rng.random() < 0.8:  # the digests of a hostile writer fit
                changed["state_bytes"], changed["state_digest"] = len(state), hashlib.blake2b(state).hexdigest()
                rest = {key: value for key, value in changed.items() if key != "digest"}
                changed["digest"] = hashlib.blake2b(json.dumps(rest, sort_keys=True).encode()).hexdigest()
        except (TypeError, ValueError, AttributeError):
            changed = tree
        text = json.dumps(changed).encode()
        (path / "meta.json").write_bytes(spoil_bytes(text, rng) if rng.random() < 0.2 else text)
        (run.path / "best.json").write_bytes(spoil_json({"checkpoint": path.name, "tau": 1.5}, rng))

    def read() -> None:
        newest_whole(run.checkpoints)
        found = read_checkpoint(path)
        one.load_state_dict(found.tensors(), found.meta.trainer)
        choose_checkpoint(run.path)

    accepted, refused = attack(watch, read, spoil, 150 * size, "checkpoint")
    assert accepted and refused


@SIZES
def test_files_of_a_run(watch, tmp_path, size):
    run = RunFolder(tmp_path)
    path = tmp_path / "metrics.jsonl"
    records = [{"step": step, "loss": 1.0} for step in range(5)]

    def spoil(rng: random.Random) -> None:
        text = "".join(json.dumps(spoil_tree(record, rng) if rng.random() < 0.2 else record) + "\n" for record in records).encode()
        path.write_bytes(spoil_bytes(text, rng) if rng.random() < 0.5 else text)

    accepted, refused = attack(watch, lambda: run.read("metrics.jsonl"), spoil, 50 * size, "run files")
    assert accepted and refused


def test_no_file_is_unpickled(watch, tmp_path):
    """A pickle that would run a command, under every name that other tools would load it by."""
    import pickle

    class Command:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "escaped",))

    for name in (
        "pytorch_model.bin",
        "model.safetensors",
        "state.safetensors",
        "meta.json",
        "optimizer.pt",
        "manifest.json",
        "config.json",
    ):
        for folder in ("target", "drafter", "checkpoints/step-00000001", "data/train"):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_bytes(pickle.dumps(Command()))
    (tmp_path / "data" / "train" / "00000.arrow").write_bytes(pickle.dumps(Command()))
    embed = torch.zeros(8, 4)
    for read in (
        lambda: read_target_shape(tmp_path / "target"),
        lambda: WeightFiles(tmp_path / "target"),
        lambda: load_drafter(tmp_path / "drafter", embed, embed),
        lambda: read_checkpoint(tmp_path / "checkpoints" / "step-00000001"),
        lambda: open_dataset(tmp_path / "data"),
    ):
        assert attack(watch, read, lambda _: None, 1, "pickle") == (0, 1)
    assert not (tmp_path / "escaped").exists()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_a_folder_in_place_of_a_file_is_one_line(watch, tmp_path, make):
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    for name in ("config.json", "meta.json", "manifest.json", "config.yaml", "model.safetensors"):
        make(tmp_path / name)
    (tmp_path / "train").mkdir()
    make(tmp_path / "train" / "0.arrow")
    for read in (
        lambda: read_target_shape(tmp_path),
        lambda: WeightFiles(tmp_path),
        lambda: read_checkpoint(tmp_path),
        lambda: open_dataset(tmp_path),
        lambda: load_config([tmp_path / "config.yaml"]),
    ):
        assert attack(watch, read, lambda _: None, 1, make.__name__) == (0, 1)
