"""The folder of one run: what was asked for, what happened, and what can be continued.

run.json (where the run lives while it lives), config.yaml (starts the same run again), metrics.jsonl (one line per optimizer step and
nothing else), validation.jsonl, events.jsonl, trained.jsonl (one line per batch whose gradient is in the weights), checkpoints/,
summary.json. After a rewind to a checkpoint the lines behind it are removed, so nothing stands in a file twice. A full disk stops no run:
lines wait in memory until there is room again. One process at a time writes (`RunFolder.lock`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dflash_ray.config.schema import Config
from dflash_ray.file_lock import take_lock
from dflash_ray.json_file import replace_text

if TYPE_CHECKING:
    from filelock import BaseFileLock

METRICS, VALIDATION, EVENTS, TRAINED = "metrics.jsonl", "validation.jsonl", "events.jsonl", "trained.jsonl"
OURS = (METRICS, VALIDATION, EVENTS, TRAINED, "run.json", "config.yaml", "summary.json", "checkpoints", "export", "best.json")
OURS += ("wandb", "tensorboard", ".lock")


class RunFolder:
    def __init__(self, path: Path):
        self.path = Path(path)
        self.trouble: str | None = None  # why lines wait, while they do
        self._waiting: defaultdict[str, list[str]] = defaultdict(list)
        self._lock: BaseFileLock | None = None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def holds_a_run(self) -> bool:
        return any((self.path / name).exists() for name in ("run.json", "config.yaml", METRICS, "checkpoints"))

    def clear(self) -> None:
        """`--fresh`: removes what a run wrote, and nothing else that may lie in the folder."""
        for name in OURS:
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def create(self, config: Config, run_info: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self.write_json("run.json", run_info)
        replace_text(self.path / "config.yaml", yaml.safe_dump(config.as_dict(), sort_keys=False))

    def write_json(self, name: str, value: Any) -> None:
        """Replaces `name` in one move, so a reader never sees half of it."""
        replace_text(self.path / name, json.dumps(value, indent=1, default=str))

    def lock(self) -> bool:
        """Takes the folder for this process, until it ends. False while another one has it."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = take_lock(self.path / ".lock", required=False)  # a run without a lock is better than none
        if lock is None:
            return False
        self._lock = lock
        return True

    def unlock(self) -> None:
        self._lock.release()

    def append(self, name: str, *records: dict[str, Any]) -> None:
        """Whole lines or none: what a full disk does not take waits, in order, for the next call."""
        self._waiting[name] += [json.dumps(record, default=float) + "\n" for record in records]
        self.trouble = None
        for waiting in list(self._waiting):
            try:
                self._write(waiting, "".join(self._waiting[waiting]).encode())
            except OSError as error:
                self.trouble = f"{waiting}: {error.strerror or error}"
            else:
                del self._waiting[waiting]

    def _write(self, name: str, data: bytes) -> None:
        handle = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            before = os.fstat(handle).st_size
            try:
                while data:
                    data = data[os.write(handle, data) :]
            except OSError:
                os.ftruncate(handle, before)
                raise
        finally:
            os.close(handle)

    def sync(self) -> None:
        """What was appended survives a crash of the machine; before a checkpoint that counts on it. OSError if it cannot be."""
        self.append(TRAINED)
        if self.trouble:
            raise OSError(self.trouble)
        for name in (METRICS, VALIDATION, EVENTS, TRAINED):
            if (self.path / name).exists():
                handle = os.open(self.path / name, os.O_RDONLY)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)

    def read(self, name: str) -> list[dict[str, Any]]:
        """All whole lines; a line torn by a crash is not one. ValueError for a line that is no JSON object."""
        return [record for record, _ in self._lines(name)]

    def _lines(self, name: str) -> list[tuple[dict[str, Any], int]]:
        """(record, where its line begins in the file)."""
        try:
            text = (self.path / name).read_bytes()
        except FileNotFoundError:
            return []
        records, begin = [], 0
        for number, line in enumerate(text.split(b"\n")[:-1], 1):  # what follows the last newline was not finished
            try:
                record = json.loads(line) if line.strip() else None
            except (ValueError, RecursionError):
                raise ValueError(f"{self.path / name}: line {number} is no JSON; the file was damaged") from None
            if record is not None and not isinstance(record, dict):
                raise ValueError(f"{self.path / name}: line {number} is no JSON object; the file was damaged")
            if record is not None:
                records.append((record, begin))
            begin += len(line) + 1
        return records

    def rewind(self, step: int, next_batch: int) -> None:
        """Back to a checkpoint: keeps what happened up to and including optimizer step `step` (steps count from 1)."""
        self._cut(METRICS, "step", lambda number: number <= step)
        self._cut(VALIDATION, "step", lambda number: number <= step)
        self._cut(TRAINED, "batch", lambda number: number < next_batch)
        self._cut(EVENTS, "step", lambda _: True)

    def _cut(self, name: str, key: str, in_time: Callable[[int], bool]) -> None:
        """Lines are in order, so the file ends where the first unwanted one begins, or a torn one; that needs no room on the disk."""

        def wanted(record: dict[str, Any]) -> bool:
            if not isinstance(record.get(key), int):
                raise ValueError(f"{self.path / name}: a line has no {key}; the file was damaged")
            return in_time(record[key])

        self._waiting[name] = [line for line in self._waiting[name] if wanted(json.loads(line))]
        path = self.path / name
        if not path.exists():
            return
        unwanted = [begin for record, begin in self._lines(name) if not wanted(record)]
        whole = path.read_bytes().rfind(b"\n") + 1
        os.truncate(path, min([whole, *unwanted]))
