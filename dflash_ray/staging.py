"""Finished work of a preparation, kept beside its output until the data set is written.

A part is a few dozen megabytes of samples: an Arrow file and then a small JSON file that says how far the input is done with it, each
renamed into place. A part counts only with its JSON, so a process killed at any moment leaves whole parts. The folder is locked while it
is in use.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

_PART_TOKENS = 8 << 20
_PART_CHUNKS = 256
_SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.uint8())), ("group", pa.uint64()), ("source", pa.string())]
)


class Stage:
    """`with Stage(output, identity) as stage`: parts made for another `identity` are removed. ValueError if another process is at work.

    `chunks` and `counts` tell what the whole parts hold. A part in the making is kept when a signal ends the block, lost otherwise.
    """

    def __init__(self, output: Path, identity: dict[str, Any]):
        self.folder = output.parent / f"{output.name}.partial"
        self.chunks = 0
        self.counts: dict[str, Any] = {}
        self._identity = identity
        self._parts = 0
        self._pending: list[Any] = []
        self._pending_tokens = 0
        self._pending_counts: dict[str, Any] = {}

    def __enter__(self) -> Stage:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / "lock", "w")
        except OSError as error:
            raise ValueError(f"--output: {self.folder} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ValueError(f"--output: another preparation is writing to {self.folder}") from None
        if _json(self.folder / "identity.json") != self._identity:
            for path in self.folder.iterdir():
                if path.name != "lock":
                    path.unlink()
            _write_json(self.folder / "identity.json", self._identity)
        while part := _json(self._path(self._parts, ".json")):
            self.chunks, self.counts = part["chunks"], part["counts"]
            self._parts += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self.flush(self._pending_counts)
        self._lock.close()

    def add(self, prepared: Any, counts: dict[str, Any]) -> None:
        """`prepared`: input_ids, loss_mask, lengths, groups, sources of the next chunk. `counts`: of all chunks so far, JSON values."""
        self._pending.append(prepared)
        self._pending_counts = counts
        self._pending_tokens += len(prepared.input_ids)
        if self._pending_tokens >= _PART_TOKENS or len(self._pending) >= _PART_CHUNKS:
            self.flush(counts)

    def flush(self, counts: dict[str, Any]) -> None:
        """Makes a part of what was added since the last one."""
        if not self._pending:
            return
        path = self._path(self._parts, ".arrow")
        with open(path.with_suffix(".tmp"), "wb") as file:
            with pa.ipc.new_file(file, _SCHEMA) as writer:
                for prepared in self._pending:
                    writer.write_batch(_record_batch(prepared))
            file.flush()
            os.fsync(file.fileno())
        os.replace(path.with_suffix(".tmp"), path)
        self.chunks += len(self._pending)
        _write_json(path.with_suffix(".json"), {"chunks": self.chunks, "counts": counts})
        self._parts += 1
        self._pending, self._pending_tokens = [], 0

    def groups(self) -> np.ndarray:
        """uint64 [samples]."""
        return np.concatenate([np.empty(0, np.uint64), *(batch.column("group").to_numpy() for batch in self._batches())])

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
        for index in range(self._parts):
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


def _write_json(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_suffix(".json.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _json(path: Path) -> dict[str, Any] | None:
    """None if there is no whole file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
