"""The target's own answers to prompts and conversations, in the order of the input.

Finished conversations go to `OUT.partial` as they come and into `OUT` in input order at the end. Each is known by a hash of what its
answers depend on: a run that was stopped, or one over a longer input, asks only for what is missing. A group of prompts whose engine fails
is asked again one by one; a conversation that fails three times is left out and counted.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dflash_ray.data.prepare.conversations import Conversation, parse_row
from dflash_ray.data.prepare.dialogue import Dialogue, dialogue_key
from dflash_ray.data.prepare.rows import Refused, decode_row, find_files, is_blank, read_chunks
from dflash_ray.data.prepare.tokenizer import ChatTokenizer
from dflash_ray.file_lock import take_lock
from dflash_ray.target.shape import TargetShape
from dflash_ray.target.weights import WeightFiles

_ATTEMPTS = 3


@dataclass(frozen=True)
class GenerateSettings:
    prompts: tuple[Path, ...]
    target: Path
    output: Path
    thinking: tuple[bool, ...]  # each gives a row of its own
    max_new_tokens: int
    temperature: float
    seed: int
    group: int  # prompts asked for in one call

    def check(self) -> None:
        """ValueError for values that make no sense."""
        if self.max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens {self.max_new_tokens}: must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"--temperature {self.temperature}: must be 0 (greedy) or more")


@dataclass
class Asked:
    """One prompt on its way."""

    dialogue: Dialogue
    prompt: list[int]
    stream: int  # of random numbers, by content


@dataclass
class Failure:
    reason: str


class CrewLost(RuntimeError):
    """Engines die faster than they answer."""


class Crew(Protocol):
    """Engines at work."""

    free: int  # calls that can be made at once

    def ask(self, group: list[Asked]) -> None: ...

    def wait(self) -> tuple[list[Asked], list[list[int]] | Failure]:
        """The next call that ends."""


@dataclass
class Tally:
    rows_read: int = 0
    skipped: Counter[str] = field(default_factory=Counter)  # conversations that cannot be asked, by reason
    examples: dict[str, str] = field(default_factory=dict)  # reason -> the first place
    reused: int = 0
    answered: int = 0
    failed: int = 0
    failed_calls: Counter[str] = field(default_factory=Counter)  # retried or given up, by reason
    ended_early: Counter[str] = field(default_factory=Counter)  # answered conversations of which the later turns are missing
    turns: int = 0
    tokens: int = 0


def generate(
    settings: GenerateSettings,
    tokenizer: ChatTokenizer,
    target_shape: TargetShape,
    stops: tuple[int, ...],
    crew: Crew,
    progress: Callable[[Tally], None] = lambda tally: None,
) -> dict[str, Any]:
    """Writes `settings.output` and returns the report (JSON values). ValueError for the user's mistakes."""
    settings.check()
    tokenizer.require_template()
    started = time.monotonic()
    tally = Tally()
    order: list[str] = []
    with _Journal(settings.output) as journal:
        work = _dialogues(settings, tokenizer, target_shape, journal, order, tally)
        _answer_all(work, settings, set(stops), crew, journal, tally, progress)
        written = journal.finish(order)
    counts = {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(tally).items()}
    seconds = time.monotonic() - started
    rate = round(tally.tokens / max(seconds, 1e-9), 1)
    return {**counts, "written": written, "seconds": round(seconds, 3), "tokens_per_second": rate}


def _answer_all(
    work: Iterator[Dialogue],
    settings: GenerateSettings,
    stops: set[int],
    crew: Crew,
    journal: _Journal,
    tally: Tally,
    progress: Callable[[Tally], None],
) -> None:
    ready: deque[Asked] = deque()
    busy = 0
    while True:
        while crew.free and (group := _next_group(ready, work, settings, tally)):
            crew.ask(group)
            busy += 1
        if not busy:
            return
        group, result = crew.wait()
        busy -= 1
        if isinstance(result, Failure):
            tally.failed_calls[result.reason] += 1
            _retry(group, ready, tally)
        else:
            for asked, output in zip(group, result, strict=True):
                _take(asked, output, stops, ready, journal, tally)
            journal.flush()
        progress(tally)


def _dialogues(
    settings: GenerateSettings, tokenizer: ChatTokenizer, target_shape: TargetShape, journal: _Journal, order: list[str], tally: Tally
) -> Iterator[Dialogue]:
    """Conversations without answers; `order` gets the key of every row that the output should hold."""
    made_with = _made_with(settings, tokenizer)
    longest = target_shape.max_position_embeddings - 1
    seen: Counter[str] = Counter()
    for chunk in read_chunks(find_files(list(settings.prompts), "--prompts")):
        for line, raw in chunk:
            if is_blank(raw):
                continue
            tally.rows_read += 1
            try:
                row, conversation = _read(raw)
            except Refused as refusal:
                _skip(tally, refusal, f"{chunk.file}:{line}")
                continue
            for thinking in settings.thinking:
                key = dialogue_key(row.get("id"), conversation, thinking, made_with)
                seen[key] += 1
                if settings.temperature > 0 and seen[key] > 1:  # asked again for another answer
                    key = f"{key}-{seen[key]}"
                order.append(key)
                if key in journal:
                    tally.reused += 1
                elif settings.temperature > 0 or seen[key] == 1:
                    yield Dialogue(key, f"{chunk.file}:{line}", row.get("id"), conversation, thinking, tokenizer, longest)


def _read(raw: Any) -> tuple[dict[str, Any], Conversation]:
    row = decode_row(raw)
    conversation = parse_row(row)
    if not isinstance(conversation, Conversation):
        raise Refused("no_conversation", "the row holds ids; an answer needs messages")
    return row, conversation


def _made_with(settings: GenerateSettings, tokenizer: ChatTokenizer) -> str:
    """What besides the conversation decides an answer."""
    weights = WeightFiles(settings.target).fingerprint()
    config = (settings.target / "config.json").read_bytes()
    sampling = (settings.temperature, settings.seed if settings.temperature > 0 else None, settings.max_new_tokens)
    return hashlib.sha256(repr((weights, config, tokenizer.fingerprint(), sampling)).encode()).hexdigest()


def _next_group(ready: deque[Asked], work: Iterator[Dialogue], settings: GenerateSettings, tally: Tally) -> list[Asked]:
    """Prompts for one call: those that are ready, then new conversations; one that failed before goes alone."""
    while len(ready) < settings.group and (dialogue := next(work, None)) is not None:
        try:
            ready.append(_asked(dialogue))
        except Refused as refusal:
            _skip(tally, refusal, dialogue.place)
    if ready and ready[0].dialogue.failures:
        return [ready.popleft()]
    alone = next((place for place, asked in enumerate(ready) if asked.dialogue.failures), len(ready))
    return [ready.popleft() for _ in range(min(settings.group, alone))]


def _asked(dialogue: Dialogue) -> Asked:
    digits = hashlib.sha256(f"{dialogue.key} {dialogue.turns}".encode()).digest()[:6]
    return Asked(dialogue, dialogue.prompt(), int.from_bytes(digits, "big"))


def _take(asked: Asked, output: list[int], stops: set[int], ready: deque[Asked], journal: _Journal, tally: Tally) -> None:
    dialogue = asked.dialogue
    dialogue.failures = 0
    dialogue.take(asked.prompt, output, stops)
    tally.turns += 1
    tally.tokens += len(output)
    if not dialogue.done:
        try:
            ready.append(_asked(dialogue))
        except Refused as refusal:
            dialogue.stop(refusal.reason)
    if dialogue.done:
        journal.add(dialogue.key, dialogue.row())
        tally.answered += 1
        if dialogue.ended_early:
            tally.ended_early[dialogue.ended_early] += 1


def _retry(group: list[Asked], ready: deque[Asked], tally: Tally) -> None:
    for asked in reversed(group):
        asked.dialogue.failures += 1
        if asked.dialogue.failures >= _ATTEMPTS:
            tally.failed += 1
        else:
            ready.appendleft(asked)


def _skip(tally: Tally, refusal: Refused, place: str) -> None:
    tally.skipped[refusal.reason] += 1
    tally.examples.setdefault(refusal.reason, f"{place}: {refusal.detail}" if refusal.detail else place)


class _Journal:
    """Finished rows by key: those of an earlier output and of an interrupted run, and new ones as they come."""

    def __init__(self, output: Path):
        self._output = output
        self._partial = output.parent / f"{output.name}.partial"
        self._places: dict[str, tuple[Path, int]] = {}
        try:
            lock = take_lock(self._partial, required=True)  # before anything is read: the holder may be about to replace both files
            if lock is None:
                raise ValueError(f"--output {output}: another process is writing to it")
            self._lock = lock
            try:
                for path in (output, self._partial):
                    self._index(path)
                self._file = open(self._partial, "ab")
            except BaseException:
                if not self._partial.stat().st_size:
                    self._partial.unlink()
                lock.release()
                raise
        except OSError as error:
            raise ValueError(f"--output {output}: cannot be written: {error.strerror}") from None

    def __enter__(self) -> _Journal:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()
        self._lock.release()

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def add(self, key: str, row: dict[str, Any]) -> None:
        self._places[key] = (self._partial, self._file.tell())
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")

    def flush(self) -> None:
        self._file.flush()

    def finish(self, order: list[str]) -> int:
        """Writes the output in the order of `order`, rows that were never answered left out; returns how many there are.

        An earlier output that holds other rows too is kept as `OUT.before`.
        """
        self._file.flush()
        temporary = self._output.parent / f"{self._output.name}.tmp"
        sources = {path: open(path, "rb") for path in (self._output, self._partial) if path.exists()}
        written = 0
        with open(temporary, "wb") as out:
            for key in order:
                if key in self._places:
                    path, place = self._places[key]
                    sources[path].seek(place)
                    out.write(sources[path].readline())
                    written += 1
            out.flush()
            os.fsync(out.fileno())
        for source in sources.values():
            source.close()
        wanted = set(order)
        if any(path == self._output and key not in wanted for key, (path, _) in self._places.items()):
            os.replace(self._output, self._output.parent / f"{self._output.name}.before")
        os.replace(temporary, self._output)
        self._partial.unlink()
        return written

    def _index(self, path: Path) -> None:
        """Rows that are whole; the last line of a killed run may not be, and is cut off so that nothing is appended to it."""
        if not path.exists():
            return
        with open(path, "rb") as file:
            place = 0
            while line := file.readline():
                if not line.endswith(b"\n"):
                    break
                try:
                    key = json.loads(line)["key"]
                except (ValueError, LookupError, TypeError):
                    raise ValueError(f"{path}: holds a row that is not from this job; remove the file or choose another --output") from None
                self._places[key] = (path, place)
                place = file.tell()
        if path == self._partial:
            os.truncate(path, place)
