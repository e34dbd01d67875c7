"""One Arrow file, memory-mapped: number columns as a whole, list columns row by row.

pyarrow reads the metadata only; what it says is turned into byte positions in the file, and every access is checked against the file's
size first, so that a broken file is a ValueError and never a bad read. Bytes of columns that are not asked for are never touched. Both
Arrow containers are read (file and stream), uncompressed. `release` hands mapped pages back to the system, so that a process which has
read a whole data set holds only what it was given. pyarrow's own memory map with full validation is as safe on damaged files, but keeps
the pages: 20,000 random samples of a 1.9 GiB data set take 1,950 MiB of memory instead of 36, and opening it cold 2.8 s instead of 0.1.
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


@dataclass(frozen=True)
class _Lists:
    """The lists of one record batch: row i is items offsets[i] : offsets[i + 1]."""

    offsets: _Numbers
    items: _Numbers
    valid: _Numbers | None  # one bit per item, 0 = null; None if no item can be


class ArrowShard:
    """`rows` rows of the Arrow file at `path`.

    The columns named in `numbers` and `lists` can be read; those in `optional` may be missing (`has`). ValueError if the file is broken,
    if another one is missing or if one does not hold whole numbers.
    """

    def __init__(self, path: Path, numbers: Sequence[str], lists: Sequence[str], optional: Sequence[str] = ()):
        self.path = path
        try:
            if path.exists() and not path.is_file():
                raise ValueError("is no regular file")  # opening a pipe would block for ever
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: mmap of an empty file
            raise ValueError(f"{path}: cannot be read: {error}") from None
        self._map.madvise(mmap.MADV_RANDOM)  # else the kernel reads megabytes round each touched byte, in the end the whole file
        buffer = pa.py_buffer(self._map)
        self._base = buffer.address
        self._numbers: dict[str, list[_Numbers]] = {}
        self._lists: dict[str, list[_Lists]] = {}
        counts = [0]
        try:
            for batch in _record_batches(path, buffer):
                if batch.num_rows == 0:
                    continue
                counts.append(batch.num_rows)
                self._check_names(batch.schema.names, [name for name in (*numbers, *lists) if name not in optional])
                for name in set(numbers).intersection(batch.schema.names):
                    self._numbers.setdefault(name, []).append(self._locate_numbers(name, batch))
                for name in set(lists).intersection(batch.schema.names):
                    self._lists.setdefault(name, []).append(self._locate_lists(name, batch))
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not a whole Arrow file: {str(error).splitlines()[0]}") from None
        self._first_row = np.cumsum(np.array(counts, np.int64))
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
        parts = [np.diff(self._offsets(piece, 0, piece.offsets.count - 1)) for piece in self._lists.get(column, [])]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def list_row(self, column: str, row: int) -> np.ndarray:
        """int64 items of one row (a copy)."""
        batch, local = self._place(row)
        piece = self._lists[column][batch]
        return self._items(piece, self._offsets(piece, local, local + 1))

    def list_chunks(self, column: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (int64 offsets from 0, int64 items) of some rows after the other."""
        for piece in self._lists.get(column, []):
            for first in range(0, piece.offsets.count - 1, _ROWS_PER_CHUNK):
                offsets = self._offsets(piece, first, min(first + _ROWS_PER_CHUNK, piece.offsets.count - 1))
                yield offsets - offsets[0], self._items(piece, offsets)
                self.release()

    def release(self) -> None:
        """Hands the mapped pages back to the system; what was read is a copy and stays."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def _place(self, row: int) -> tuple[int, int]:
        batch = int(np.searchsorted(self._first_row, row, side="right")) - 1
        return batch, row - int(self._first_row[batch])

    def _offsets(self, piece: _Lists, first: int, last: int) -> np.ndarray:
        out = self._read(piece.offsets, first, last + 1)
        if out[0] < 0 or out[-1] > piece.items.count or (np.diff(out) < 0).any():
            raise ValueError(f"{self.path}: list offsets are damaged; make the data set again")
        return out

    def _items(self, piece: _Lists, offsets: np.ndarray) -> np.ndarray:
        start, stop = int(offsets[0]), int(offsets[-1])
        if piece.valid is not None and not self._read(piece.valid, start, stop).all():
            raise ValueError(f"{self.path}: a list holds an empty (null) item; drop that row")
        return self._read(piece.items, start, stop)

    def _read(self, numbers: _Numbers, first: int, last: int) -> np.ndarray:
        """int64 copy of items first..last-1."""
        if numbers.dtype.kind == "b":
            bits = self._raw(np.dtype(np.uint8), numbers.start + first // 8, (last + 7) // 8 - first // 8)
            return np.unpackbits(bits, bitorder="little")[first % 8 :][: last - first].astype(np.int64)
        return self._raw(numbers.dtype, numbers.start + first * numbers.dtype.itemsize, last - first).astype(np.int64)

    def _raw(self, dtype: np.dtype, start: int, count: int) -> np.ndarray:
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        if count:
            self._map.madvise(mmap.MADV_WILLNEED, page, start + count * dtype.itemsize - page)  # one disk access instead of one per page
        return np.frombuffer(self._map, dtype, count, start)

    def _check_names(self, names: list[str], required: list[str]) -> None:
        for name in required:
            if name not in names:
                raise ValueError(f"{self.path}: no column {name!r} among {names[:20]}; name it in data.columns")
        if len(set(names)) < len(names):
            raise ValueError(f"{self.path}: two columns have one name, {names[:20]}")

    # Lengths and null counts of arrays are as untrusted as the rest of a file, so only buffers, whose bounds are checked here, are used.

    def _locate_numbers(self, name: str, batch: pa.RecordBatch) -> _Numbers:
        array = batch.column(name)
        valid, items = self._buffers(name, array, array.type, 2)
        if valid is not None and not self._read(self._locate(name, valid, batch.num_rows, np.dtype(bool)), 0, batch.num_rows).all():
            raise ValueError(f"{self.path}: column {name!r} has empty (null) rows; drop them")
        return self._locate(name, items, batch.num_rows, np.dtype(array.type.to_pandas_dtype()))

    def _locate_lists(self, name: str, batch: pa.RecordBatch) -> _Lists:
        array = batch.column(name)
        if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
            raise ValueError(f"{self.path}: column {name!r} holds {array.type}, not lists of whole numbers")
        kind = array.type.value_type
        valid, offsets, items_valid, items = self._buffers(name, array, kind, 4)
        if valid is not None and not self._read(self._locate(name, valid, batch.num_rows, np.dtype(bool)), 0, batch.num_rows).all():
            raise ValueError(f"{self.path}: column {name!r} has empty (null) rows; drop them")
        width = np.dtype(np.int32 if pa.types.is_list(array.type) else np.int64)
        dtype = np.dtype(kind.to_pandas_dtype())
        count = 0 if items is None else items.size * 8 // (1 if dtype.kind == "b" else 8 * dtype.itemsize)
        return _Lists(
            self._locate(name, offsets, batch.num_rows + 1, width),
            self._locate(name, items, count, dtype),
            None if items_valid is None else self._locate(name, items_valid, items_valid.size * 8, np.dtype(bool)),
        )

    def _buffers(self, name: str, array: pa.Array, kind: pa.DataType, expected: int) -> list[pa.Buffer | None]:
        if not (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
            raise ValueError(f"{self.path}: column {name!r} holds {array.type}, not whole numbers")
        buffers = array.buffers()
        if len(buffers) != expected or array.offset != 0:
            raise ValueError(f"{self.path}: column {name!r} is damaged; make the data set again")
        return buffers

    def _locate(self, name: str, buffer: pa.Buffer | None, count: int, dtype: np.dtype) -> _Numbers:
        if count == 0:
            return _Numbers(0, 0, dtype)
        needed = (count + 7) // 8 if dtype.kind == "b" else count * dtype.itemsize
        start = buffer.address - self._base if buffer is not None else -1
        if count < 0 or not 0 <= start <= start + needed <= len(self._map) or buffer.size < needed:
            raise ValueError(f"{self.path}: column {name!r} is compressed or damaged; write it again, uncompressed")
        return _Numbers(start, count, dtype)


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
