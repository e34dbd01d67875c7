"""Conversations to a data set: every row is kept or refused with a reason, counts always add up, nothing is left half written.

Rows are prepared chunk by chunk (`ChunkWorker`, a pure function of the chunk) and staged beside the output in parts. A part is whole or
absent; a run that was stopped goes on after its last whole part. The data set itself is written from the parts at the end and renamed
into place, because the validation split needs to know all conversations: rows that ask the same question land on the same side.
Nothing here knows Ray; a job may hand in a `spread` that runs `ChunkWorker`s elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dflash_ray.conversations import Conversation, Tokenised, parse_row
from dflash_ray.dataset_writer import DatasetWriter
from dflash_ray.render import Rendered, Renderer
from dflash_ray.rows import Chunk, InputFile, Refused, decode_json, find_files, read_chunks
from dflash_ray.staging import Stage
from dflash_ray.tokenizer import ChatTokenizer

VERSION = 1  # of what a row becomes; parts of another version are not continued
REPORT = "report.json"  # in the data set's folder
_EXAMPLES = 3  # places named per reason
_REASONS = 64  # reasons told apart; a template that puts data into its message could make any number
_EDGES = [2**power for power in range(5, 21)]
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


@dataclass
class Counts:
    """lines_read = kept + sum of skipped, at any time."""

    lines_read: int = 0
    kept: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)  # reason -> "file:line: detail" of the first few
    samples: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    turns: int = 0
    turns_skipped: dict[str, int] = field(default_factory=dict)  # of kept lines
    clipped: int = 0
    turns_with_ids: int = 0
    turns_encoded_differently: int = 0
    answers_spelling_special_tokens: int = 0
    length_histogram: dict[str, int] = field(default_factory=dict)  # samples of at most so many tokens and more than the one before
    added_tokens: dict[str, int] = field(default_factory=dict)  # id -> how often, of added tokens that occur

    def add(self, other: Counts) -> None:
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(value, int):
                setattr(self, name, mine + value)
            elif name == "examples":
                for reason, places in value.items():
                    mine[reason] = [*mine.get(reason, []), *places][:_EXAMPLES]
            else:
                for key, number in value.items():
                    _count(mine, key, number)

    def skip(self, refusal: Refused, place: str) -> None:
        reason = _count(self.skipped, refusal.reason)
        places = self.examples.setdefault(reason, [])
        if len(places) < _EXAMPLES:
            places.append(f"{place}: {refusal.detail}" if refusal.detail else place)


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


class ChunkWorker:
    """Chunk to `Prepared`; what it returns depends on the chunk alone."""

    def __init__(self, settings: PrepareSettings, tokenizer: ChatTokenizer):
        self._strict = settings.strict
        self._columns = dict(settings.columns)
        self._renderer = Renderer(tokenizer, settings.max_length)
        self._added = np.asarray(tokenizer.added_ids, np.int64)

    def __call__(self, chunk: Chunk) -> Prepared:
        counts = Counts()
        samples: list[tuple[np.ndarray, np.ndarray]] = []
        groups: list[int] = []
        sources: list[str] = []
        stop = None
        for line, row in chunk:
            place = f"{chunk.file}:{line}"
            counts.lines_read += 1
            try:
                content, rendered = self._row(row)
            except Refused as refusal:
                counts.skip(refusal, place)
                if self._strict and refusal.reason not in ("blank", "too_long"):
                    stop = f"{place}: {refusal}"
                    break
                continue
            if self._strict and (refused := [turn for turn in rendered.refused_turns if turn.reason != "too_long"]):
                stop = f"{place}: {refused[0]}"
                break
            counts.kept += 1
            _count_rendered(counts, rendered)
            samples += rendered.samples
            groups += [group_of(content)] * len(rendered.samples)
            sources += [place] * len(rendered.samples)
        return self._packed(samples, groups, sources, counts, chunk.bytes_read, stop)

    def _row(self, row: Any) -> tuple[Conversation | Tokenised, Rendered]:
        if isinstance(row, Refused):
            raise row
        if isinstance(row, bytes):
            if not row.strip():
                raise Refused("blank")
            row = decode_json(row)
        try:
            content = parse_row(row, self._columns)
            return content, self._renderer.render(content)
        except RecursionError:
            raise Refused("nested_too_deep") from None

    def _packed(self, samples, groups, sources, counts: Counts, bytes_read: int, stop: str | None) -> Prepared:
        ids = np.concatenate([np.empty(0, np.int32), *(ids for ids, _ in samples)])
        mask = np.concatenate([np.empty(0, np.uint8), *(mask for _, mask in samples)])
        lengths = np.array([len(ids) for ids, _ in samples], np.int32)
        counts.samples, counts.tokens, counts.supervised_tokens = len(samples), len(ids), int(mask.sum())
        for edge, number in zip(*np.unique(np.searchsorted(_EDGES, lengths), return_counts=True), strict=True):
            counts.length_histogram[str(_EDGES[edge])] = int(number)
        found, numbers = np.unique(ids[np.isin(ids, self._added)], return_counts=True)
        counts.added_tokens = {str(index): int(number) for index, number in zip(found, numbers, strict=True)}
        return Prepared(ids, mask, lengths, np.array(groups, np.uint64), sources, counts, bytes_read, stop)


def group_of(content: Conversation | Tokenised) -> int:
    """A 64-bit hash of what comes before the first answer: rows that share it must not be split between training and validation."""
    if isinstance(content, Tokenised):
        first = content.loss_mask.index(1) if 1 in content.loss_mask[1:] and not content.loss_mask[0] else len(content.input_ids)
        text = repr(content.input_ids[:first])
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
    started = time.monotonic()
    with Stage(settings.output, identity) as stage:
        counts = Counts(**stage.counts)
        resumed = stage.chunks
        for prepared in (spread or partial(map, ChunkWorker(settings, tokenizer)))(islice(read_chunks(files), resumed, None)):
            if prepared.stop:
                stage.remove()
                raise ValueError(f"{prepared.stop} (--strict stops at the first bad row)")
            counts.add(prepared.counts)
            stage.add(prepared, vars(counts))
            if progress:
                progress(prepared.bytes_read, sum(file.bytes for file in files), counts)
        stage.flush(vars(counts))
        report = _plain(counts)
        if counts.samples:
            report["splits"] = _write_splits(
                settings,
                stage,
                {**identity["tokenizer"], "vocab_size": tokenizer.size, "config": identity["config"], "counts": dict(report)},
            )
        report |= _effort(counts, files, time.monotonic() - started, resumed)
        if counts.samples:
            text = json.dumps({"report": report, "made_from": identity}, indent=1)
            (settings.output / REPORT).write_text(text + "\n", encoding="utf-8")
        stage.remove()
    return report


def _write_splits(settings: PrepareSettings, stage: Stage, manifest: dict[str, Any]) -> dict[str, Any]:
    held_out = validation_groups(stage.groups(), settings.validation)
    with DatasetWriter(settings.output) as writer:
        for ids, mask, group, source in stage.samples():
            writer.add("validation" if group in held_out else "train", ids, mask, source)
        return writer.finish(manifest)["splits"]


def validation_groups(groups: np.ndarray, share: float) -> set[int]:
    """Which groups are held out: whole groups in the order of their hash, about `share` of the samples: one group at
    least if the share comes to a sample and there are two groups, never all of them."""
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
    """What the samples depend on, and nothing that names a machine or a time."""
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
        written = json.loads((output / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        written = {}
    if written.get("made_from") == identity:
        return written["report"]
    raise ValueError(f"--output {output}: exists and was not made from this input, tokenizer and --max-length; remove it or choose another")


def _plain(counts: Counts) -> dict[str, Any]:
    histogram = {edge: counts.length_histogram[edge] for edge in sorted(counts.length_histogram, key=int)}
    return {**vars(counts), "length_histogram": histogram}


def _effort(counts: Counts, files: list[InputFile], seconds: float, resumed: int) -> dict[str, Any]:
    return {
        "files": len(files),
        "bytes": sum(file.bytes for file in files),
        "seconds": round(seconds, 3),
        "tokens_per_second": None if resumed else round(counts.tokens / max(seconds, 1e-9)),
        "resumed_after_chunks": resumed,
    }


def _count_rendered(counts: Counts, rendered: Rendered) -> None:
    counts.turns += rendered.turns
    counts.clipped += rendered.clipped
    counts.turns_with_ids += rendered.with_ids
    counts.turns_encoded_differently += rendered.ids_differ
    counts.answers_spelling_special_tokens += rendered.spelled_specials
    for refusal in rendered.refused_turns:
        _count(counts.turns_skipped, refusal.reason)


def _count(table: dict[str, int], key: str, number: int = 1) -> str:
    """Adds to `table` and returns the key that was used; new keys past a bound are counted together."""
    if key not in table and len(table) >= _REASONS and not key.isdigit():
        key = "other"
    table[key] = table.get(key, 0) + number
    return key
