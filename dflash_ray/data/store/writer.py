"""Writes the data set folder that `open_dataset` reads.

`OUT/train/00000.arrow ...`, `OUT/validation/...`: uncompressed Arrow IPC files with the columns `sample_id int64` (row number in the
split), `input_ids list<int32>`, `loss_mask list<uint8>`, `seq_len int32`, `anchor_candidates int32`, `source string`, and
`OUT/manifest.json`. The folder appears whole or not at all: everything is written under a temporary name beside it, flushed to disk and
renamed. Memory is one record batch per split, whatever the size of the data.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from dflash_ray.data.anchors import anchor_candidates

SCHEMA = pa.schema(
    [
        ("sample_id", pa.int64()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("seq_len", pa.int32()),
        ("anchor_candidates", pa.int32()),
        ("source", pa.string()),
    ]
)
_BATCH_ROWS, _BATCH_TOKENS, SHARD_BYTES = 1024, 1 << 21, 1 << 30


class DatasetWriter:
    """`with DatasetWriter(path) as writer: writer.add("train", ids, mask, source) ...; writer.finish(manifest)`.

    Leaving the block without `finish` (an error, Ctrl-C) removes what was written. ValueError if `path` exists. A shard that has reached
    `shard_bytes` is closed and the next one begun.
    """

    def __init__(self, path: Path | str, shard_bytes: int = SHARD_BYTES):
        self.path = Path(path)
        if self.path.exists():
            raise ValueError(f"{self.path}: exists already; choose another folder or remove it")
        self._folder = self.path.parent / f".{self.path.name}.{uuid.uuid4().hex[:8]}.partial"
        self._folder.mkdir(parents=True)
        self._shard_bytes = shard_bytes
        self._splits: dict[str, _SplitWriter] = {}

    def add(self, split: str, input_ids: Any, loss_mask: Any, source: str = "") -> int:
        """Appends one sample ([T] ids and [T] 0/1 mask, T >= 2) and returns its sample id. ValueError if it has no anchor candidate."""
        if split not in self._splits:
            self._splits[split] = _SplitWriter(self._folder / split, self._shard_bytes)
        return self._splits[split].add(np.asarray(input_ids), np.asarray(loss_mask), source)

    def finish(self, manifest: dict[str, Any], beside: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> dict[str, Any]:
        """Adds the counts of every split under `splits`, writes the manifest, renames the folder into place, returns the manifest.

        `beside(manifest)`: name -> value of JSON files that appear in the folder with it.
        """
        if not self._splits:
            raise ValueError(f"{self.path}: no samples to write")
        manifest = {**manifest, "splits": {name: split.close() for name, split in self._splits.items()}}
        for name, value in {"manifest.json": manifest, **(beside(manifest) if beside else {})}.items():
            with open(self._folder / name, "w", encoding="utf-8") as file:
                json.dump(value, file, indent=1, sort_keys=name == "manifest.json")
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
        try:
            os.rename(self._folder, self.path)
        except OSError as error:
            raise ValueError(f"{self.path}: cannot be put in place: {error.strerror}") from None
        return manifest

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, *_error: object) -> None:
        for split in self._splits.values():
            split.abandon()
        shutil.rmtree(self._folder, ignore_errors=True)  # gone already after finish()


def write_dataset(path: Path | str, splits: dict[str, Iterable[Any]], manifest: dict[str, Any]) -> dict[str, Any]:
    """Writes {split: samples with input_ids, loss_mask and perhaps source (attributes)} to `path`; returns the manifest as written."""
    with DatasetWriter(path) as writer:
        for split, samples in splits.items():
            for sample in samples:
                writer.add(split, sample.input_ids, sample.loss_mask, getattr(sample, "source", ""))
        return writer.finish(manifest)


class _SplitWriter:
    def __init__(self, folder: Path, shard_bytes: int):
        folder.mkdir()
        self._folder, self._shard_bytes = folder, shard_bytes
        self._rows: list[tuple[np.ndarray, np.ndarray, int, str]] = []
        self._row_tokens = 0
        self._file: BinaryIO | None = None
        self._writer: pa.RecordBatchFileWriter | None = None
        self._counts = {"samples": 0, "tokens": 0, "supervised_tokens": 0, "longest": 0, "shards": 0}

    def add(self, input_ids: np.ndarray, loss_mask: np.ndarray, source: str) -> int:
        sample_id = self._counts["samples"]
        if input_ids.ndim != 1 or input_ids.shape != loss_mask.shape or input_ids.dtype.kind not in "iu":
            raise ValueError(
                f"sample {sample_id}: {input_ids.shape} {input_ids.dtype} tokens with {loss_mask.shape} mask; give two equal lists"
            )
        if len(input_ids) < 2 or input_ids.min() < 0 or input_ids.max() > np.iinfo(np.int32).max:
            raise ValueError(f"sample {sample_id}: needs at least 2 token ids of 0 or more")
        if not np.isin(loss_mask, (0, 1)).all():
            raise ValueError(f"sample {sample_id}: the loss mask may hold 0 and 1 only")
        candidates = len(anchor_candidates(loss_mask))
        if candidates == 0:
            raise ValueError(f"sample {sample_id}: no two supervised tokens in a row, so it has no anchor; leave it out")
        self._rows.append((input_ids.astype(np.int32), loss_mask.astype(np.uint8), candidates, source))
        self._row_tokens += len(input_ids)
        self._counts["samples"] += 1
        self._counts["tokens"] += len(input_ids)
        self._counts["supervised_tokens"] += int(np.count_nonzero(loss_mask))
        self._counts["longest"] = max(self._counts["longest"], len(input_ids))
        if len(self._rows) >= _BATCH_ROWS or self._row_tokens >= _BATCH_TOKENS:
            self._flush()
        return sample_id

    def close(self) -> dict[str, int]:
        self._flush()
        self._close_shard()
        return dict(self._counts)

    def abandon(self) -> None:
        self._rows = []
        self._close_shard()

    def _flush(self) -> None:
        if not self._rows:
            return
        if self._file is None:
            self._file = open(self._folder / f"{self._counts['shards']:05d}.arrow", "wb")
            self._writer = pa.ipc.new_file(self._file, SCHEMA)
            self._counts["shards"] += 1
        ids, masks, candidates, sources = zip(*self._rows, strict=True)
        lengths = np.array([len(row) for row in ids], np.int32)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        first = self._counts["samples"] - len(ids)
        arrays = [
            pa.array(np.arange(first, first + len(ids))),
            pa.ListArray.from_arrays(offsets, np.concatenate(ids)),
            pa.ListArray.from_arrays(offsets, np.concatenate(masks)),
            pa.array(lengths),
            pa.array(np.array(candidates, np.int32)),
            pa.array(sources, pa.string()),
        ]
        self._writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))
        self._rows, self._row_tokens = [], 0
        if self._file.tell() >= self._shard_bytes:
            self._close_shard()

    def _close_shard(self) -> None:
        if self._file is None:
            return
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = self._writer = None
