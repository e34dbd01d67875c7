"""Input files to numbered rows, in an order that depends on the files alone, in memory that does not depend on their size.

A row is one line of JSONL, one element of a JSON array, or one row of a Parquet file or of a folder saved by Hugging Face `datasets`.
What cannot be read is a row too: a `Refused` with its reason, so that every count adds up. Rows travel in chunks of about a megabyte,
cut the same way on every run: a run that was interrupted skips the chunks it has done.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from dflash_ray.data.prepare.json_values import Broken, json_values
from dflash_ray.json_file import read_json_object

CHUNK_BYTES = 1 << 20
CHUNK_ROWS = 2048
TABLE_ROWS, TABLE_BYTES = 256, 8 << 20  # of a table at a time; a row may have more bytes than that
MAX_ROW_BYTES = 32 << 20
_JSON_NAMES = (".jsonl", ".json", ".ndjson")
_READ_ERRORS = (OSError, EOFError, zlib.error, pa.ArrowException)


class Refused(ValueError):
    """A row, or a part of one, that must not be trained on. `reason` is a short code that is counted, `detail` tells more."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail

    def __reduce__(self):
        return Refused, (self.reason, self.detail)


@dataclass(frozen=True)
class InputFile:
    path: Path
    name: str  # as the user would find it
    kind: str  # jsonl | json | parquet | arrow
    bytes: int
    modified_ns: int


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of one file. `rows`: JSON text as bytes, a decoded row, or why there is none; or an Arrow table of decoded rows."""

    file: str
    lines: list[int]
    rows: list[Any] = field(default_factory=list)
    table: pa.Table | None = None
    bytes_read: int = 0  # of the whole input, up to and with this chunk

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return zip(self.lines, self.rows if self.table is None else _table_rows(self.table), strict=True)


def find_files(inputs: list[Path], flag: str = "--input") -> list[InputFile]:
    """The readable files of `inputs` (files, folders searched in name order, saved datasets). ValueError where there are none."""
    files: list[InputFile] = []
    for path in inputs:
        if not path.exists():
            raise ValueError(f"{flag} {path}: no such file or folder")
        found = _files_under(path) if path.is_dir() else [(path, _kind(path) or "jsonl")]
        if not found:
            raise ValueError(f"{flag} {path}: no .jsonl, .json, .gz, .parquet or .arrow file in this folder")
        files += [_input_file(part, kind) for part, kind in found]
    return files


def _input_file(path: Path, kind: str) -> InputFile:
    try:
        status = path.stat()
    except OSError:  # a dangling link, for instance: reading it says so, and counts it
        return InputFile(path, str(path), kind, 0, 0)
    return InputFile(path, str(path), kind, status.st_size, status.st_mtime_ns)


def read_chunks(files: list[InputFile]) -> Iterator[Chunk]:
    """Every row of every file once, in order."""
    done = 0
    for file in files:
        reader = {"jsonl": _read_lines, "json": _read_json, "parquet": _read_parquet, "arrow": _read_arrow}[file.kind]
        last = 0
        try:
            for chunk, position in reader(file):
                last = max(last, chunk.lines[-1])
                yield _placed(chunk, done + min(position, file.bytes))
        except _READ_ERRORS as error:
            reason = Refused("unreadable_file", str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__)
            yield Chunk(file.name, [last + 1], [reason], None, done + file.bytes)
        done += file.bytes


def is_blank(raw: Any) -> bool:
    """Whether a row of a chunk is an empty line."""
    return isinstance(raw, bytes) and not raw.strip()


def decode_row(raw: Any) -> Any:
    """What a row of a chunk holds. `Refused` where reading it failed or it is no JSON."""
    if isinstance(raw, Refused):
        raise raw
    return decode_json(raw) if isinstance(raw, bytes) else raw


def decode_json(data: bytes | str) -> Any:
    """One JSON value; `Refused` says what is wrong with it."""
    if isinstance(data, bytes):
        try:
            data = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise Refused("not_utf8", f"byte {error.start} of the row") from None
    try:
        return _DECODER.decode(data.lstrip("\ufeff"))
    except Refused:
        raise
    except RecursionError:
        raise Refused("nested_too_deep") from None
    except ValueError as error:
        raise Refused("not_json", str(error)[:120]) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        raise Refused("duplicate_key", repr(next(name for name in names if names.count(name) > 1)))
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def _kind(path: Path) -> str | None:
    name = path.name.lower().removesuffix(".gz")
    if name.endswith(".parquet"):
        return "parquet"
    if name.endswith(".arrow"):
        return "arrow"
    if name.endswith(_JSON_NAMES):
        return "json" if name.endswith(".json") else "jsonl"
    return "jsonl" if path.name.lower().endswith(".gz") else None


def _files_under(folder: Path) -> list[tuple[Path, str]]:
    """Readable files of a folder and the folders in it. Of a folder saved by Hugging Face `datasets` only what its state.json lists."""
    found = []
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        kind = None if hidden or path.is_dir() else _kind(path)
        saved = _saved_files(path.parent)
        if kind and (saved is None or path.name in saved) and path.name != "dataset_dict.json":
            found.append((path, kind))
        if path.name == "state.json" and saved and not hidden:  # what it lists and is not there: reading it says so, and counts it
            found += [(path.parent / name, "arrow") for name in saved if not (path.parent / name).exists()]
    return sorted(found)


@lru_cache(maxsize=16)
def _saved_files(folder: Path) -> set[str] | None:
    """Names of the data files of a saved dataset; None for any other folder."""
    try:
        return {entry["filename"] for entry in read_json_object(folder / "state.json")["_data_files"]}
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _placed(chunk: Chunk, position: int) -> Chunk:
    return Chunk(chunk.file, chunk.lines, chunk.rows, chunk.table, position)


def _grouped(file: InputFile, rows: Iterator[tuple[int, Any, int]]) -> Iterator[tuple[Chunk, int]]:
    """(line, row, position in the file) to chunks of bounded size. An error after some rows leaves those rows in a chunk of their own."""
    lines: list[int] = []
    values: list[Any] = []
    size = position = 0
    failure: BaseException | None = None
    while True:
        try:
            line, value, position = next(rows)
        except StopIteration:
            break
        except _READ_ERRORS as error:
            failure = error
            break
        lines.append(line)
        values.append(value)
        size += len(value) if isinstance(value, bytes | str) else 64
        if size >= CHUNK_BYTES or len(lines) >= CHUNK_ROWS:
            yield Chunk(file.name, lines, values), position
            lines, values, size = [], [], 0
    if lines:
        yield Chunk(file.name, lines, values), position
    if failure is not None:
        raise failure


def _open(file: InputFile) -> tuple[BinaryIO, BinaryIO]:
    """(bytes to read, raw file whose position shows the progress)."""
    raw = open(file.path, "rb")
    return (gzip.GzipFile(fileobj=raw), raw) if file.path.name.lower().endswith(".gz") else (raw, raw)


def _read_lines(file: InputFile) -> Iterator[tuple[Chunk, int]]:
    return _grouped(file, _lines(file))


def _lines(file: InputFile) -> Iterator[tuple[int, Any, int]]:
    content, raw = _open(file)
    with raw, content:
        number = 0
        while line := content.readline(MAX_ROW_BYTES):
            number += 1
            if len(line) == MAX_ROW_BYTES and not line.endswith(b"\n"):
                while (rest := content.readline(MAX_ROW_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield number, Refused("row_too_long", f"more than {MAX_ROW_BYTES >> 20} MiB"), raw.tell()
            else:
                yield number, line, raw.tell()


def _read_json(file: InputFile) -> Iterator[tuple[Chunk, int]]:
    return _grouped(file, _json_values(file))


def _json_values(file: InputFile) -> Iterator[tuple[int, Any, int]]:
    content, raw = _open(file)
    with raw, content:
        for line, value in json_values(content, MAX_ROW_BYTES):
            yield line, Refused("not_json", str(value)) if isinstance(value, Broken) else value, raw.tell()


def _read_parquet(file: InputFile) -> Iterator[tuple[Chunk, int]]:
    # without a buffer size, and with pre_buffer, a whole row group is in memory, which may be all of the file
    with pq.ParquetFile(file.path, buffer_size=1 << 20, pre_buffer=False) as parquet:
        total = max(1, parquet.metadata.num_rows)
        size = sum(parquet.metadata.row_group(group).total_byte_size for group in range(parquet.metadata.num_row_groups))
        yield from _tables(file, parquet.iter_batches(batch_size=_rows_at_once(size, total), use_threads=False), total)


def _read_arrow(file: InputFile) -> Iterator[tuple[Chunk, int]]:
    with pa.OSFile(str(file.path)) as source:  # read, not mapped: mapped pages count as this process's memory
        try:
            batches = pa.ipc.open_stream(source)
        except pa.ArrowInvalid:
            source.seek(0)
            opened = pa.ipc.open_file(source)
            batches = (opened.get_batch(index) for index in range(opened.num_record_batches))
        yield from _tables(file, batches, 0)


def _tables(file: InputFile, batches, total: int) -> Iterator[tuple[Chunk, int]]:
    line = 1
    for batch in batches:
        names = batch.schema.names
        if len(set(names)) < len(names):
            raise pa.ArrowInvalid(f"two columns have one name: {', '.join(names)[:120]}")
        batch = batch.select([field.name for field in batch.schema if not _is_foreign(field.type)])
        step = _rows_at_once(batch.nbytes, batch.num_rows)
        for start in range(0, batch.num_rows, step):
            table = pa.Table.from_batches([batch.slice(start, step)])
            position = file.bytes * (line + table.num_rows) // total if total else file.bytes
            yield Chunk(file.name, list(range(line, line + table.num_rows)), [], table), position
            line += table.num_rows


def _rows_at_once(size: int, rows: int) -> int:
    """How many of `rows` rows with `size` bytes are taken at a time."""
    return max(1, min(TABLE_ROWS, TABLE_BYTES * rows // max(size, 1)))


def _is_foreign(kind: pa.DataType) -> bool:
    """Whether no part of a conversation can be of this type: dates, durations, decimals. Python has no value for some of them."""
    return pa.types.is_temporal(kind) or pa.types.is_decimal(kind)


def _table_rows(table: pa.Table) -> Iterator[Any]:
    try:
        yield from map(_without_nulls, table.to_pylist())
    except (ValueError, OverflowError):  # text that is no UTF-8, a value that Python cannot hold
        for row in range(table.num_rows):
            yield _table_row(table.slice(row, 1))


def _table_row(table: pa.Table) -> Any:
    try:
        return _without_nulls(table.to_pylist()[0])
    except UnicodeDecodeError as error:
        return Refused("not_utf8", str(error)[:120])
    except (ValueError, OverflowError) as error:
        return Refused("unreadable_row", str(error)[:120])


def _without_nulls(value: Any) -> Any:
    """Arrow has no missing keys, only nulls in their place; taking those out gives back the row as it was written."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return [_without_nulls(item) for item in value]
    return value
