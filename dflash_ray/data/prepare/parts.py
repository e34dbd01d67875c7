"""Finished work of a preparation, kept beside its output until the data set is written.

A part is a few dozen megabytes of samples: an Arrow file and then a small JSON file that says how far the input is done with it, each
renamed into place. A part counts only with its JSON, so a process killed at any moment leaves whole parts. The folder is locked while it
is in use.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dflash_ray.data.prepare.counts import Counts
from dflash_ray.file_lock import take_lock
from dflash_ray.json_file import read_json_object, replace_text

_PART_TOKENS = 8 << 20
_PART_CHUNKS = 256
_SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.uint8())), ("group", pa.uint64()), ("source", pa.string())]
)


@dataclass(frozen=True)
class _Progress:
    """Replaced as a whole, so that a signal between two steps finds either all of a part or none of it."""

    parts: int = 0
    chunks: int = 0
    counts: dict[str, Any] = field(default_factory=dict)  # of whole parts
    pending: list[Any] = field(default_factory=list)


class Parts:
    """`with Parts(output, identity) as parts`: parts made for another `identity` are removed. ValueError if another process is at work.

    A part in the making is kept when a signal ends the block, lost otherwise.
    """

    def __init__(self, output: Path, identity: dict[str, Any]):
        self.folder = output.parent / f"{output.name}.partial"
        self._identity = identity
        self._progress = _Progress()

    def __enter__(self) -> Parts:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = take_lock(self.folder / "lock", required=True)
        except OSError as error:
            raise ValueError(f"--output: {self.folder} cannot be written: {error.strerror}") from None
        if lock is None:
            raise ValueError(f"--output: another preparation is writing to {self.folder}")
        self._lock = lock
        if _read(self.folder / "identity.json") != self._identity:
            for path in self.folder.iterdir():
                if path.name != "lock":
                    path.unlink()
            replace_text(self.folder / "identity.json", json.dumps(self._identity), sync=True)
        while part := _read(self._path(self._progress.parts, ".json")):
            self._progress = _Progress(self._progress.parts + 1, part["chunks"], part["counts"])
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self.flush()
        if kind is not None and not self._progress.parts:
            self.remove()
        self._lock.release()

    @property
    def chunks(self) -> int:
        """Chunks in whole parts."""
        return self._progress.chunks

    def counts(self) -> Counts:
        """Of the chunks in whole parts."""
        return Counts(**deepcopy(self._progress.counts))

    def add(self, prepared: Any) -> None:
        """`prepared`: input_ids, loss_mask, lengths, groups, sources and counts of the next chunk."""
        self._progress.pending.append(prepared)
        tokens = sum(len(chunk.input_ids) for chunk in self._progress.pending)
        if tokens >= _PART_TOKENS or len(self._progress.pending) >= _PART_CHUNKS:
            self.flush()

    def flush(self) -> None:
        """Makes a part of what was added since the last one."""
        progress = self._progress
        if not progress.pending:
            return
        path = self._path(progress.parts, ".arrow")
        with open(path.with_suffix(".tmp"), "wb") as file:
            with pa.ipc.new_file(file, _SCHEMA) as writer:
                for prepared in progress.pending:
                    writer.write_batch(_record_batch(prepared))
            file.flush()
            os.fsync(file.fileno())
        os.replace(path.with_suffix(".tmp"), path)
        counts = self.counts()
        for prepared in progress.pending:
            counts.add(prepared.counts)
        part = {"chunks": progress.chunks + len(progress.pending), "counts": counts.as_dict()}
        replace_text(path.with_suffix(".json"), json.dumps(part), sync=True)
        self._progress = _Progress(progress.parts + 1, part["chunks"], part["counts"])

    def groups(self) -> np.ndarray:
        """uint64 [samples]."""
        # a copy each: a view would keep the tokens of its batch in memory
        return np.concatenate([np.empty(0, np.uint64), *(batch.column("group").to_numpy().copy() for batch in self._batches())])

    def samples(self) -> Iterator[tuple[np.ndarray, np.ndarray, int, str]]:
        """(input_ids, loss_mask, group, source) of every sample in order; the arrays are views that live as long as they are held."""
        for batch in self._batches():
            ids, masks, groups, sources = (batch.column(name) for name in _SCHEMA.names)
            offsets = ids.offsets.to_numpy()
            flat_ids, flat_masks = ids.values.to_numpy(), masks.values.to_numpy()
            for row, (group, source) in enumerate(zip(groups.to_pylist(), sources.to_pylist(), strict=True)):
                start, stop = offsets[row], offsets[row + 1]
                yield flat_ids[start:stop], flat_masks[start:stop], group, source

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        for index in range(self._progress.parts):
            with pa.OSFile(str(self._path(index, ".arrow"))) as file:
                reader = pa.ipc.open_file(file)
                for number in range(reader.num_record_batches):
                    yield reader.get_batch(number)

    def _path(self, index: int, suffix: str) -> Path:
        return self.folder / f"part-{index:05d}{suffix}"


def _record_batch(prepared: Any) -> pa.RecordBatch:
    offsets = np.concatenate([[0], np.cumsum(prepared.lengths)]).astype(np.int32)
    arrays = [
        pa.ListArray.from_arrays(offsets, prepared.input_ids),
        pa.ListArray.from_arrays(offsets, prepared.loss_mask),
        pa.array(prepared.groups),
        pa.array(prepared.sources, pa.string()),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)


def _read(path: Path) -> dict[str, Any] | None:
    """None if there is no whole file."""
    try:
        return read_json_object(path)
    except (OSError, ValueError):
        return None
