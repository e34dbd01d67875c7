"""Conversations to a data set: every row is kept or refused with a reason, counts always add up, nothing is left half written.

Rows are prepared chunk by chunk (`ChunkWorker`, a pure function of the chunk) and kept in parts beside the output. A part is whole or
absent; a run that was stopped goes on after its last whole part. The data set itself is written from the parts at the end and renamed
into place, because the validation split needs to know all conversations: rows that ask the same question land on the same side.
Nothing here knows Ray; a job may hand in a `spread` that runs `ChunkWorker`s elsewhere. Without one a second thread encodes the texts
of a chunk, half of the work and free of Python's lock, while the next chunk is rendered.
"""

from __future__ import annotations

import hashlib
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dflash_ray.data.prepare.conversations import COLUMNS, Conversation, Tokenised, parse_row
from dflash_ray.data.prepare.counts import Counts
from dflash_ray.data.prepare.parts import Parts
from dflash_ray.data.prepare.render import Rendered, Renderer, Row
from dflash_ray.data.prepare.rows import Chunk, InputFile, Refused, decode_row, find_files, is_blank, read_chunks
from dflash_ray.data.prepare.tokenizer import ChatTokenizer
from dflash_ray.data.store.writer import DatasetWriter
from dflash_ray.json_file import read_json_object

VERSION = 3  # of what a row becomes; parts of another version are not continued
REPORT = "report.json"  # in the data set's folder
Spread = Callable[[Iterable[Chunk]], Iterator["Prepared"]]  # results in the order of the chunks
Progress = Callable[[int, int, "Counts"], None]  # bytes done, bytes in all, counts so far


@dataclass(frozen=True)
class PrepareSettings:
    inputs: tuple[Path, ...]
    tokenizer: Path
    output: Path
    max_length: int = 8192
    chat_template: Path | None = None
    validation: float = 0.01
    strict: bool = False
    columns: tuple[tuple[str, str], ...] = ()  # (our column name, the input's)

    def check(self) -> None:
        """ValueError for values that make no sense."""
        if self.max_length < 2:
            raise ValueError(f"--max-length {self.max_length}: a sample needs at least 2 tokens")
        if not 0 <= self.validation < 1:
            raise ValueError(f"--validation {self.validation}: the share of validation samples must lie in [0, 1)")
        for ours, theirs in self.columns:
            if ours not in COLUMNS:
                raise ValueError(f"--columns {ours}={theirs}: {ours} is no column of ours; they are {', '.join(COLUMNS)}")


@dataclass
class Prepared:
    """What a chunk became: samples end to end, and counts."""

    input_ids: np.ndarray  # int32 [all tokens]
    loss_mask: np.ndarray  # uint8 [all tokens]
    lengths: np.ndarray  # int32 [samples]
    groups: np.ndarray  # uint64 [samples]: equal for rows that ask the same
    sources: list[str]  # file:line per sample
    counts: Counts
    bytes_read: int = 0
    stop: str | None = None  # strict: the first row that would be skipped


@dataclass(frozen=True)
class Placed:
    """A chunk with every answer at its place in the text, before any of it is encoded."""

    chunk: Chunk
    rows: list[Row | Refused]


class ChunkWorker:
    """Chunk to `Prepared`; what it returns depends on the chunk alone. The three steps of a call may run in different threads."""

    def __init__(self, settings: PrepareSettings, tokenizer: ChatTokenizer):
        self._strict = settings.strict
        self._columns = dict(settings.columns)
        self._tokenizer = tokenizer
        self._renderer = Renderer(tokenizer, settings.max_length)
        self._added = np.asarray(tokenizer.added_ids, np.int64)

    def __call__(self, chunk: Chunk) -> Prepared:
        placed = self.place(chunk)
        return self.finish(placed, self.encode(placed))

    def place(self, chunk: Chunk) -> Placed:
        return Placed(chunk, [self._row(row) for _, row in chunk])

    def encode(self, placed: Placed) -> dict[str, list[int]]:
        """The ids of most pieces of text that `finish` will ask for."""
        return self._tokenizer.encode_pieces(text for row in placed.rows if not isinstance(row, Refused) for text in row.texts)

    def finish(self, placed: Placed, encoded: dict[str, list[int]]) -> Prepared:
        self._tokenizer.known = encoded
        counts = Counts()
        samples: list[tuple[np.ndarray, np.ndarray]] = []
        groups: list[int] = []
        sources: list[str] = []
        stop = None
        for line, row in zip(placed.chunk.lines, placed.rows, strict=True):
            place = f"{placed.chunk.file}:{line}"
            counts.lines_read += 1
            try:
                rendered = self._rendered(row)
            except Refused as refusal:
                counts.skip(refusal, place)
                if self._strict and refusal.reason not in ("blank", "too_long", "weight_0"):
                    stop = f"{place}: {refusal}"
                    break
                continue
            if self._strict and (refused := [turn for turn in rendered.refused_turns if turn.reason != "too_long"]):
                stop = f"{place}: {refused[0]}"
                break
            counts.keep(rendered)
            samples += rendered.samples
            groups += [group_of(row.content)] * len(rendered.samples)
            sources += [place] * len(rendered.samples)
        return self._packed(samples, groups, sources, counts, placed.chunk.bytes_read, stop)

    def _row(self, row: Any) -> Row | Refused:
        try:
            if is_blank(row):
                return Refused("blank")
            return self._renderer.place(parse_row(decode_row(row), self._columns))
        except Refused as refusal:
            return refusal
        except RecursionError:
            return Refused("nested_too_deep")

    def _rendered(self, row: Row | Refused) -> Rendered:
        if isinstance(row, Refused):
            raise row
        try:
            return self._renderer.finish(row)
        except RecursionError:
            raise Refused("nested_too_deep") from None

    def _packed(self, samples, groups, sources, counts: Counts, bytes_read: int, stop: str | None) -> Prepared:
        ids = np.concatenate([np.empty(0, np.int32), *(ids for ids, _ in samples)])
        mask = np.concatenate([np.empty(0, np.uint8), *(mask for _, mask in samples)])
        lengths = np.array([len(ids) for ids, _ in samples], np.int32)
        counts.measure(ids, mask, lengths, self._added)
        return Prepared(ids, mask, lengths, np.array(groups, np.uint64), sources, counts, bytes_read, stop)


def group_of(content: Conversation | Tokenised) -> int:
    """A 64-bit hash of what comes before the first answer: rows that share it must not be split between training and validation."""
    if isinstance(content, Tokenised):
        first = content.loss_mask.index(1) if 1 in content.loss_mask else 0
        text = repr(content.input_ids[:first] or content.input_ids)
    else:
        messages = content.messages
        first = next((index for index, message in enumerate(messages) if message.role == "assistant"), len(messages))
        text = repr([(message.role, message.content.strip()) for message in messages[:first]])
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def prepare(
    settings: PrepareSettings, tokenizer: ChatTokenizer, spread: Spread | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Writes the data set at `settings.output` and returns the report (JSON values, kept in the folder too).

    If nothing at all can be kept, no data set is written and the report says `samples: 0`. ValueError for the user's mistakes: settings,
    inputs, an output that holds something else, and with `strict` the first bad row.
    """
    settings.check()
    files = find_files(list(settings.inputs))
    identity = _identity(settings, files, tokenizer)
    if done := _finished(settings.output, identity):
        return {**done, "already_prepared": True}
    total = sum(file.bytes for file in files)
    started = time.monotonic()
    with Parts(settings.output, identity) as parts:
        counts = parts.counts()
        resumed = parts.chunks
        for prepared in (spread or partial(_in_this_process, ChunkWorker(settings, tokenizer)))(islice(read_chunks(files), resumed, None)):
            if prepared.stop:
                parts.remove()
                raise ValueError(f"{prepared.stop} (--strict stops at the first bad row)")
            counts.add(prepared.counts)
            parts.add(prepared)
            if progress:
                progress(prepared.bytes_read, total, counts)
        parts.flush()
        report = counts.as_dict()

        def finished(splits: dict[str, Any]) -> dict[str, Any]:
            report.update(splits, **_effort(counts, files, time.monotonic() - started, resumed))
            return {REPORT: {"report": report, "made_from": identity}}

        if counts.samples:
            made_with = {**identity["tokenizer"], "vocab_size": tokenizer.size, "config": identity["config"], "counts": dict(report)}
            _write(settings, parts, made_with, finished)
        else:
            finished({})
        parts.remove()
    return report


def _write(settings: PrepareSettings, parts: Parts, manifest: dict[str, Any], finished: Callable[..., dict[str, Any]]) -> None:
    """The data set with its report, in one rename."""
    held_out = validation_groups(parts.groups(), settings.validation)
    with DatasetWriter(settings.output) as writer:
        for ids, mask, group, source in parts.samples():
            writer.add("validation" if group in held_out else "train", ids, mask, source)
        writer.finish(manifest, lambda written: finished({"splits": written["splits"]}))


def _in_this_process(worker: ChunkWorker, chunks: Iterable[Chunk]) -> Iterator[Prepared]:
    """`map(worker, chunks)`, but a chunk's texts are encoded while the next chunk is rendered."""
    with ThreadPoolExecutor(1) as pool:
        under_way: tuple[Placed, Future[dict[str, list[int]]]] | None = None
        for chunk in chunks:
            placed = worker.place(chunk)
            encoded = pool.submit(worker.encode, placed)
            if under_way:
                yield worker.finish(under_way[0], under_way[1].result())
            under_way = placed, encoded
        if under_way:
            yield worker.finish(under_way[0], under_way[1].result())


def validation_groups(groups: np.ndarray, share: float) -> set[int]:
    """Which groups are held out: whole groups in the order of their hash, about `share` of the samples.

    At least one group if the share comes to a sample and there are two groups, and never all of them.
    """
    unique, sizes = np.unique(groups, return_counts=True)
    wanted = round(share * len(groups))
    if wanted == 0 or len(unique) < 2:
        return set()
    chosen: set[int] = set()
    for group, size in zip(unique[:-1].tolist(), sizes[:-1].tolist(), strict=True):
        if size <= wanted:
            chosen.add(group)
            wanted -= size
    return chosen or {int(unique[np.argmin(sizes)])}


def _identity(settings: PrepareSettings, files: list[InputFile], tokenizer: ChatTokenizer) -> dict[str, Any]:
    """What the data set depends on; while it stays the same, an interrupted preparation can go on."""
    return {
        "version": VERSION,
        "inputs": [{"name": file.path.name, "bytes": file.bytes, "modified_ns": file.modified_ns} for file in files],
        "tokenizer": tokenizer.fingerprint(),
        "config": {"max_length": settings.max_length, "validation": settings.validation, "columns": dict(settings.columns)},
    }


def _finished(output: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The report of a data set that was made from the same things."""
    if not output.exists():
        return None
    try:
        written = read_json_object(output / REPORT)
    except (OSError, ValueError):
        written = {}
    if written.get("made_from") == identity:
        return written["report"]
    raise ValueError(f"--output {output}: exists and was not made from this input, tokenizer and --max-length; remove it or choose another")


def _effort(counts: Counts, files: list[InputFile], seconds: float, resumed: int) -> dict[str, Any]:
    return {
        "files": len(files),
        "bytes": sum(file.bytes for file in files),
        "seconds": round(seconds, 3),
        "tokens_per_second": None if resumed else round(counts.tokens / max(seconds, 1e-9)),
        "resumed_after_chunks": resumed,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,  # of this process
    }
