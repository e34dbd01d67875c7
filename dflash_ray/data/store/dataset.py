"""Tokenised data sets: lengths at once, tokens when a batch needs them.

A data set is a folder of Arrow shards per split and a `manifest.json` (see `writer`), or a folder that Hugging Face `datasets`
saved with `save_to_disk`. Opening reads the `seq_len` and `anchor_candidates` columns alone (20 MB of pages for 902,087 samples);
token ids are read from the memory-mapped shards, sample by sample, while training. What a shard says about itself is checked when it is
read: a data set that is broken, foreign or inconsistent is a ValueError that names the file. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_ray.data.anchors import anchor_candidates
from dflash_ray.data.store.arrow_shard import ArrowShard
from dflash_ray.json_file import read_json_object

COLUMNS = ("sample_id", "input_ids", "loss_mask", "seq_len", "anchor_candidates")
_COMPUTED = ("sample_id", "seq_len", "anchor_candidates")  # a folder may lack these


@dataclass(frozen=True)
class Sample:
    sample_id: int  # row number in its split unless the folder says otherwise
    input_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # uint8 [T], 1 = supervised


class Dataset:
    """One split. Index = row over all shards.

    lengths: int64 [N] tokens per sample; anchor_candidates: int64 [N]; manifest: what the preparation wrote (Hugging Face folders: their
    dataset_info); fingerprint: hex digest of manifest, lengths and candidates, equal for equal content wherever the folder lies.
    """

    def __init__(self, path: Path, split: str, shards: list[ArrowShard], names: dict[str, str], manifest: dict[str, Any]):
        self.path, self.split, self.manifest = path, split, manifest
        self._shards, self._names = shards, names
        self._first_row = np.concatenate([[0], np.cumsum([shard.rows for shard in shards], dtype=np.int64)])
        if len(self) == 0:
            raise ValueError(f"{path}: split {split!r} has no samples")
        self.lengths = np.concatenate([self._lengths(shard) for shard in shards])
        self.anchor_candidates = np.concatenate([self._candidates(shard) for shard in shards])
        self._refuse_impossible()
        for shard in shards:
            shard.release()
        digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode())
        digest.update(self.lengths.tobytes())
        digest.update(self.anchor_candidates.tobytes())
        self.fingerprint = digest.hexdigest()[:32]

    def __len__(self) -> int:
        return int(self._first_row[-1])

    @property
    def sample_ids(self) -> np.ndarray:
        """int64 [N], read on every use."""
        column = self._names["sample_id"]
        if not all(shard.has(column) for shard in self._shards):
            return np.arange(len(self))
        return np.concatenate([shard.numbers(column) for shard in self._shards])

    def read(self, indices: np.ndarray) -> list[Sample]:
        """The samples at these rows, in this order. ValueError if a row's columns contradict each other."""
        indices = np.asarray(indices, np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"rows {indices.min()}..{indices.max()} of a data set with {len(self)}")
        which = np.searchsorted(self._first_row, indices, side="right") - 1
        samples = [self._sample(int(shard), int(index)) for shard, index in zip(which, indices, strict=True)]
        for shard in np.unique(which):
            self._shards[shard].release()
        return samples

    def _sample(self, which: int, index: int) -> Sample:
        shard, row = self._shards[which], index - int(self._first_row[which])
        ids = shard.list_row(self._names["input_ids"], row)
        mask = shard.list_row(self._names["loss_mask"], row)
        where = f"{shard.path}: row {row}"
        if not len(ids) == len(mask) == self.lengths[index]:
            raise ValueError(f"{where}: {len(ids)} tokens, {len(mask)} mask entries, seq_len {self.lengths[index]}; they must be equal")
        if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
            raise ValueError(f"{where}: token ids from {ids.min()} to {ids.max()}; they must be 0 or more and fit in 32 bits")
        if mask.min() < 0 or mask.max() > 1:
            raise ValueError(f"{where}: loss_mask holds {mask.min()}..{mask.max()}; use 1 for supervised tokens and 0 for the others")
        if len(anchor_candidates(mask)) != self.anchor_candidates[index]:
            raise ValueError(f"{where}: anchor_candidates is {self.anchor_candidates[index]}, the mask has {len(anchor_candidates(mask))}")
        has_ids = shard.has(self._names["sample_id"])
        sample_id = shard.number(self._names["sample_id"], row) if has_ids else index
        return Sample(sample_id, ids.astype(np.int32), mask.astype(np.uint8))

    def _lengths(self, shard: ArrowShard) -> np.ndarray:
        if shard.has(self._names["seq_len"]):
            return shard.numbers(self._names["seq_len"])
        return shard.list_lengths(self._names["input_ids"])

    def _candidates(self, shard: ArrowShard) -> np.ndarray:
        if shard.has(self._names["anchor_candidates"]):
            return shard.numbers(self._names["anchor_candidates"])
        counts = [np.empty(0, np.int64)]
        for offsets, mask in shard.list_chunks(self._names["loss_mask"]):
            pairs = np.zeros(len(mask) + 1, np.int64)  # pairs[i + 1]: tokens i and i+1 are supervised and of one document
            pairs[1:-1] = (mask[:-1] != 0) & (mask[1:] != 0)
            pairs[offsets[1:]] = 0
            before = np.cumsum(pairs)
            counts.append(before[offsets[1:]] - before[offsets[:-1]])
        return np.concatenate(counts)

    def _refuse_impossible(self) -> None:
        bad = np.flatnonzero((self.lengths < 1) | (self.anchor_candidates < 0) | (self.anchor_candidates >= np.maximum(self.lengths, 1)))
        if len(bad):
            row = int(bad[0])
            raise ValueError(
                f"{self.path}: row {row} of split {self.split!r} has {self.lengths[row]} tokens and {self.anchor_candidates[row]} anchor"
                " candidates; there must be at least 1 token and fewer candidates than tokens"
            )
        if not self.anchor_candidates.any():
            raise ValueError(
                f"{self.path}: no sample has two supervised tokens in a row, so nothing can be trained; check the loss mask (data.columns)"
            )


def dataset_splits(path: Path | str) -> list[str]:
    """Names of the splits a data set folder holds, `train` first. ValueError if it is no data set."""
    return list(_layout(Path(path))[0])


def open_dataset(path: Path | str, split: str = "train", columns: dict[str, str] | None = None) -> Dataset:
    """One split of the folder `path`. `columns` maps our column names to the folder's. ValueError says what is wrong with the folder."""
    path = Path(path)
    for name in columns or {}:
        if name not in COLUMNS:
            raise ValueError(f"data.columns: {name!r} is no column of ours; they are {', '.join(COLUMNS)}")
    splits, manifest = _layout(path)
    if split not in splits:
        raise ValueError(f"{path}: no split {split!r}; it has {', '.join(splits)}")
    names = {name: (columns or {}).get(name, name) for name in COLUMNS}
    optional = [names[name] for name in _COMPUTED if name not in (columns or {})]
    numbers, lists = [names[name] for name in _COMPUTED], [names["input_ids"], names["loss_mask"]]
    shards = [ArrowShard(shard, numbers, lists, optional) for shard in splits[split]]
    rows, promised = sum(shard.rows for shard in shards), _promised_rows(path, manifest, split)
    if promised is not None and promised != rows:
        raise ValueError(f"{path}: split {split!r} has {rows} rows in {len(shards)} shards, its manifest says {promised}; copy it again")
    return Dataset(path, split, shards, names, manifest)


def _layout(path: Path) -> tuple[dict[str, list[Path]], dict[str, Any]]:
    """({split: shard paths in order}, manifest) of either kind of folder."""
    try:
        return _list_folder(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None


def _list_folder(path: Path) -> tuple[dict[str, list[Path]], dict[str, Any]]:
    if not path.is_dir():
        raise ValueError(f"{path}: no such data set folder; make one with jobs.prepare_data (data.path)")
    if (path / "state.json").is_file():
        return {"train": _saved_shards(path)}, _saved_manifest(path)
    if (path / "dataset_dict.json").is_file():
        names = _json(path / "dataset_dict.json").get("splits")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) and _plain(name) for name in names):
            raise ValueError(f"{path / 'dataset_dict.json'}: names no splits")
        names = sorted(names, key=lambda name: name != "train")
        return {name: _saved_shards(path / name) for name in names}, {name: _saved_manifest(path / name) for name in names}
    splits = {folder.name: sorted(folder.glob("*.arrow")) for folder in sorted(path.iterdir()) if folder.is_dir()}
    splits = {name: shards for name, shards in sorted(splits.items(), key=lambda item: item[0] != "train") if shards}
    if not splits:
        raise ValueError(f"{path}: no data set (train/00000.arrow and manifest.json, or a folder of datasets' save_to_disk)")
    return splits, _json(path / "manifest.json") if (path / "manifest.json").exists() else {}


def _saved_shards(folder: Path) -> list[Path]:
    files = _json(folder / "state.json").get("_data_files")
    if not isinstance(files, list) or not files:
        raise ValueError(f"{folder / 'state.json'}: lists no data files")
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in files]
    for name in names:
        if not isinstance(name, str) or not _plain(name):
            raise ValueError(f"{folder / 'state.json'}: {name!r} is not the name of a file in this folder")
    return [folder / name for name in names]


def _saved_manifest(folder: Path) -> dict[str, Any]:
    features = _json(folder / "dataset_info.json").get("features") if (folder / "dataset_info.json").exists() else None
    return {"features": features, "fingerprint": _json(folder / "state.json").get("_fingerprint")}


def _promised_rows(path: Path, manifest: dict[str, Any], split: str) -> int | None:
    counts = manifest.get("splits", {})
    if not isinstance(counts, dict) or not isinstance(counts.get(split, {}), dict):
        raise ValueError(f"{path / 'manifest.json'}: `splits` must map each split to its counts")
    return counts.get(split, {}).get("samples")


def _plain(name: str) -> bool:
    return name not in ("", ".", "..") and not any(character in name for character in "/\\\0")


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
