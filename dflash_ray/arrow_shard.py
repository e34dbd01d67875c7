"""One Arrow file, memory-mapped: number columns as a whole, list columns row by row.

pyarrow reads the metadata only; what it says is turned into byte positions in the file, and every access is checked against the file's
size first, so that a broken file is a ValueError and never a bad read. Bytes of columns that are not asked for are never touched. Both
Arrow containers are read (file and stream), uncompressed. `release` hands mapped pages back to the system, so that a process which has
read a whole data set holds only what it was given.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

_ROWS_PER_CHUNK = 512
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(frozen=True)
class _Numbers:
    """A buffer of fixed-width numbers: where it starts in the file, how many, and what. Booleans are bits."""

    start: int
    count: int
    dtype: np.dtype


class ArrowShard:
    """`rows` rows of the Arrow file at `path`. `columns` names the ones that may be read; ValueError if one is missing or unreadable."""

    def __init__(self, path: Path, number_columns: Sequence[str], list_columns: Sequence[str], optional: Sequence[str] = ()):
        self.path = path
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: mmap of an empty file
            raise ValueError(f"{path}: cannot be read: {error}") from None
        buffer = pa.py_buffer(self._map)
        self._base = buffer.address
        self._numbers: dict[str, list[_Numbers]] = {}
        self._lists: dict[str, list[tuple[_Numbers, _Numbers]]] = {}
        counts = []
        try:
            for batch in _record_batches(path, buffer):
                if batch.num_rows == 0:
                    continue
                missing = [name for name in [*number_columns, *list_columns] if name not in batch.schema.names]
                if required := [name for name in missing if name not in optional]:
                    raise ValueError(f"{path}: no column {required[0]!r} (it has {', '.join(batch.schema.names)}); name it in data.columns")
                for name in number_columns:
                    if name not in missing:
                        self._numbers.setdefault(name, []).append(self._locate_numbers(name, batch.column(name)))
                for name in list_columns:
                    if name not in missing:
                        self._lists.setdefault(name, []).append(self._locate_list(name, batch.column(name)))
                counts.append(batch.num_rows)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path}: not a whole Arrow file: {str(error).splitlines()[0]}") from None
        self._first_row = np.concatenate([[0], np.cumsum(np.asarray(counts, np.int64))])
        self.rows = int(self._first_row[-1])

    def has(self, column: str) -> bool:
        return column in self._numbers or column in self._lists or self.rows == 0

    def numbers(self, column: str) -> np.ndarray:
        """int64 [rows]: a whole number column."""
        parts = [self._read(piece, 0, piece.count) for piece in self._numbers.get(column, [])]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def number(self, column: str, row: int) -> int:
        batch, local = self._place(row)
        return int(self._read(self._numbers[column][batch], local, local + 1)[0])

    def list_lengths(self, column: str) -> np.ndarray:
        """int64 [rows]: items of every row, from the offsets alone."""
        parts = [np.diff(self._offsets(offsets, values, 0, offsets.count - 1)) for offsets, values in self._lists.get(column, [])]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def list_row(self, column: str, row: int) -> np.ndarray:
        """int64 items of one row (a copy)."""
        batch, local = self._place(row)
        offsets, values = self._lists[column][batch]
        start, stop = self._offsets(offsets, values, local, local + 1)
        return self._read(values, int(start), int(stop))

    def list_chunks(self, column: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (int64 offsets from 0, int64 items) of some rows after the other."""
        for offsets, values in self._lists.get(column, []):
            for first in range(0, offsets.count - 1, _ROWS_PER_CHUNK):
                ends = self._offsets(offsets, values, first, min(first + _ROWS_PER_CHUNK, offsets.count - 1))
                yield ends - ends[0], self._read(values, int(ends[0]), int(ends[-1]))
                self.release()

    def release(self) -> None:
        """Hands the mapped pages back to the system; what was read is a copy and stays."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def _place(self, row: int) -> tuple[int, int]:
        batch = int(np.searchsorted(self._first_row, row, side="right")) - 1
        return batch, row - int(self._first_row[batch])

    def _offsets(self, offsets: _Numbers, values: _Numbers, first: int, last: int) -> np.ndarray:
        out = self._read(offsets, first, last + 1)
        if out[0] < 0 or out[-1] > values.count or (np.diff(out) < 0).any():
            raise ValueError(f"{self.path}: list offsets are damaged; make the data set again")
        return out

    def _read(self, numbers: _Numbers, first: int, last: int) -> np.ndarray:
        """int64 copy of items first..last-1."""
        if numbers.dtype.kind == "b":
            bits = np.frombuffer(self._map, np.uint8, (last + 7) // 8 - first // 8, numbers.start + first // 8)
            out = np.unpackbits(bits, bitorder="little")[first % 8 :][: last - first].astype(np.int64)
        else:
            width = numbers.dtype.itemsize
            out = np.frombuffer(self._map, numbers.dtype, last - first, numbers.start + first * width).astype(np.int64)
        return out

    def _locate_list(self, name: str, array: pa.Array) -> tuple[_Numbers, _Numbers]:
        if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
            raise ValueError(f"{self.path}: column {name!r} holds {array.type}, not lists of whole numbers")
        self._refuse_nulls(name, array)
        width = np.dtype(np.int32 if pa.types.is_list(array.type) else np.int64)
        return self._locate_buffer(name, array.buffers()[1], len(array) + 1, width), self._locate_numbers(name, array.values)

    def _locate_numbers(self, name: str, array: pa.Array) -> _Numbers:
        self._refuse_nulls(name, array)
        if not (pa.types.is_integer(array.type) or pa.types.is_boolean(array.type)):
            raise ValueError(f"{self.path}: column {name!r} holds {array.type}, not whole numbers")
        return self._locate_buffer(name, array.buffers()[1], len(array), np.dtype(array.type.to_pandas_dtype()))

    def _locate_buffer(self, name: str, buffer: pa.Buffer | None, count: int, dtype: np.dtype) -> _Numbers:
        if count == 0:
            return _Numbers(0, 0, dtype)
        needed = (count + 7) // 8 if dtype.kind == "b" else count * dtype.itemsize
        start = buffer.address - self._base if buffer is not None else -1
        if not 0 <= start <= start + needed <= len(self._map) or buffer.size < needed:
            raise ValueError(f"{self.path}: column {name!r} is compressed or damaged; write it again, uncompressed")
        return _Numbers(start, count, dtype)

    def _refuse_nulls(self, name: str, array: pa.Array) -> None:
        if array.null_count:
            raise ValueError(f"{self.path}: column {name!r} has {array.null_count} empty (null) entries; drop them")


def _record_batches(path: Path, buffer: pa.Buffer):
    if buffer.size >= 6 and buffer[:6].to_pybytes() == b"ARROW1":
        reader = pa.ipc.open_file(pa.BufferReader(buffer))
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)
        return
    with pa.ipc.open_stream(pa.BufferReader(buffer)) as reader:
        yield from reader
    if buffer[-8:].to_pybytes() != _END_OF_STREAM:
        raise ValueError(f"{path}: is cut off, the end mark of the Arrow stream is missing; copy it again")
