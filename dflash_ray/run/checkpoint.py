"""Checkpoints that are whole or do not exist.

A checkpoint is a folder `step-00000015` with `state.safetensors` (float32 state) and `meta.json`, which holds the size and the digest of
the tensors and a digest of itself. It is written under a temporary name, synced and renamed, so a crash at any moment leaves the one
before it intact. Reading checks both digests and every value it uses: a torn, truncated, bit-flipped or foreign folder is refused by name
with the reason. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dflash_ray.json_file import read_json_object
from dflash_ray.records import MAPPING, NUMBER, TEXT, Check, Record, key, list_of, or_null
from dflash_ray.run.metric_records import QuarantinedBatch

FORMAT = "dflash-ray checkpoint 1"
NAME = re.compile(r"step-(\d{8})")


def _before_fingerprints(values: dict[str, Any]) -> dict[str, Any]:
    """Checkpoints made before the best one could go by replay_tau, and before the target's weights had a fingerprint."""
    return {"best_by": "tau", "weights": None, **values}


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and NAME.fullmatch(value) is not None


def _whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_quarantined(value: Any) -> bool:
    try:
        return isinstance(value, dict) and QuarantinedBatch.from_json(value, "an entry", "batch") is not None
    except ValueError:
        return False


WHOLE: Check = ("a whole number", _whole)


@dataclass(frozen=True, kw_only=True)
class CheckpointMeta(Record):
    """meta.json of a checkpoint: where the run was, what it was made from, and digests of the tensors.

    `step` optimizer steps are done and `next_batch` is the training batch to go on with. A run continues only from a checkpoint of the
    same `plan`, `dataset` and `weights` (fingerprints), `batches_per_step` and `seed`. `trainer` is `DraftTrainer.state_dict`'s, `shape`
    the drafter's. `state_bytes` and `state_digest` (BLAKE2b) are of state.safetensors. The file's `format` holds the version.
    """

    step: int = key(WHOLE)
    next_batch: int = key(WHOLE)
    set_aside: list[dict[str, Any]] = key(("a list of batches", list_of(_is_quarantined)))  # values of `QuarantinedBatch`
    best_tau: float | None = key(("a number or null", lambda value: value is None or type(value) in (int, float)))
    best_by: str = key(("tau or replay_tau", lambda value: value in ("tau", "replay_tau")))
    best_name: str | None = key(or_null(("the name of a checkpoint", _is_name)))
    plan: str = key(TEXT)
    dataset: str = key(TEXT)
    weights: str | None = key(or_null(TEXT))  # empty: random weights; None: nobody looked
    batches_per_step: int = key(WHOLE)
    seed: int = key(WHOLE)
    trainer: dict[str, Any] = key(MAPPING)
    shape: dict[str, Any] = key(MAPPING)
    state_bytes: int = key(WHOLE)
    state_digest: str = key(TEXT)

    UPGRADES = (_before_fingerprints,)


@dataclass(frozen=True, kw_only=True)
class BestCheckpoint(Record):
    """best.json: the name of the best checkpoint so far, and the number of the validation that made it so."""

    checkpoint: str = key(("the name of a checkpoint", _is_name))
    tau: float = key(NUMBER)
    by: str = key(("tau or replay_tau", lambda value: value in ("tau", "replay_tau")))


@dataclass(frozen=True)
class RunIdentity:
    """What a run and the checkpoint that it continues must have in common; fingerprints, and two settings."""

    plan: str
    dataset: str
    weights: str
    batches_per_step: int
    seed: int


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    meta: CheckpointMeta

    @property
    def step(self) -> int:
        return self.meta.step

    @property
    def next_batch(self) -> int:
        return self.meta.next_batch

    def tensors(self) -> dict[str, torch.Tensor]:
        try:
            return load_file(self.path / "state.safetensors")
        except (SafetensorError, OSError, RuntimeError, KeyError) as error:
            raise ValueError(f"checkpoint {self.path}: state.safetensors cannot be read: {error}") from None


def save_checkpoint(folder: Path, tensors: dict[str, torch.Tensor], meta: CheckpointMeta) -> Path:
    """Writes `folder/step-XXXXXXXX`, with the size and the digest of `tensors` in place of those in `meta`. OSError (disk full) leaves what
    was there before as it was."""
    final = folder / f"step-{meta.step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".writing-{final.name}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        state = temporary / "state.safetensors"
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, state)
        except SafetensorError as error:  # safetensors wraps the system's error in its own
            raise OSError(str(error)) from None
        meta = replace(meta, state_bytes=state.stat().st_size, state_digest=_digest_file(state))
        whole = {"format": FORMAT, **meta.as_json()}
        whole["digest"] = _digest_meta(whole)
        (temporary / "meta.json").write_text(json.dumps(whole, indent=1, allow_nan=False))
        for path in (state, temporary / "meta.json", temporary):
            _sync(path)
        if final.exists():  # the same step saved again after a rewind; the state is the same, bit for bit
            old = folder / f".old-{final.name}-{os.getpid()}"
            final.rename(old)
            temporary.rename(final)
            shutil.rmtree(old, ignore_errors=True)
        else:
            temporary.rename(final)
        _sync(folder)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, verified whole. ValueError names the folder and what is wrong with it."""

    def refuse(reason: str) -> ValueError:
        return ValueError(f"checkpoint {path}: {reason}")

    try:
        if not path.is_dir():
            raise refuse("no such folder")
        whole = read_json_object(path / "meta.json")
    except FileNotFoundError:
        raise refuse("meta.json is missing; this is no whole checkpoint") from None
    except OSError as error:
        raise refuse(f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise error if str(error).startswith("checkpoint ") else refuse(f"meta.json {error}") from None
    if whole.get("format") != FORMAT:
        raise refuse(f"meta.json is not of the format {FORMAT!r}; it was not written by this trainer")
    if whole.get("digest") != _digest_meta(whole):
        raise refuse("meta.json does not match its own digest; it was changed or damaged")
    try:  # a digest shows damage, not who wrote it
        keys = {name: value for name, value in whole.items() if name not in ("format", "digest")}
        meta = CheckpointMeta.from_json(keys, "meta.json", *(field.name for field in fields(CheckpointMeta)))
    except ValueError as error:
        raise refuse(str(error)) from None
    if meta.weights is None and "weights" in whole:
        raise refuse("weights of meta.json is not a text; the file was damaged")
    state = path / "state.safetensors"
    if not state.is_file():
        raise refuse("state.safetensors is missing")
    try:
        size, digest = state.stat().st_size, _digest_file(state) if state.stat().st_size == meta.state_bytes else None
    except OSError as error:
        raise refuse(f"state.safetensors cannot be read: {error.strerror}") from None
    if size != meta.state_bytes:
        raise refuse(f"state.safetensors has {size:,} bytes instead of {meta.state_bytes:,}")
    if digest != meta.state_digest:
        raise refuse("state.safetensors does not match its digest; it is damaged")
    return Checkpoint(path, meta)


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete-looking checkpoint folders, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir())


def newest_whole(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and one line per newer one that was refused."""
    refused: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            found = read_checkpoint(path)
            if int(path.name.partition("-")[2]) != found.step:
                raise ValueError(f"checkpoint {path}: is that of step {found.step}; it was renamed or copied")
            return found, refused
        except ValueError as error:
            refused.append(str(error))
    return None, refused


def prune(folder: Path, keep: int, best: str | None) -> list[Path]:
    """Removes all but the newest `keep` checkpoints and the one named `best`."""
    paths = list_checkpoints(folder)
    gone = [path for path in paths[: max(len(paths) - keep, 0)] if path.name != best]
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)
    return gone


def remove_leftovers(folder: Path) -> None:
    """Temporary folders of a writer that was killed. Only at start, when nobody writes."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name.startswith((".writing-", ".old-")):
                shutil.rmtree(path, ignore_errors=True)


def _digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _digest_meta(meta: dict[str, Any]) -> str:
    rest = {key: value for key, value in meta.items() if key != "digest"}
    return hashlib.blake2b(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
