"""The folder of one run: what was asked for, what happened, and what can be continued.

run.json (where the run lives while it lives), config.yaml (starts the same run again), metrics.jsonl (one line per optimizer step and
nothing else), validation.jsonl, events.jsonl, trained.jsonl (one line per batch whose gradient is in the weights), checkpoints/,
summary.json. After a rewind to a checkpoint the lines behind it are removed, so nothing stands in a file twice.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from dflash_ray.config import Config

METRICS, VALIDATION, EVENTS, TRAINED = "metrics.jsonl", "validation.jsonl", "events.jsonl", "trained.jsonl"
OURS = (METRICS, VALIDATION, EVENTS, TRAINED, "run.json", "config.yaml", "summary.json", "checkpoints", "export", "best.json")
OURS += ("wandb", "tensorboard")


class RunFolder:
    def __init__(self, path: Path):
        self.path = Path(path)

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

    def create(self, config: Config, facts: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self.write_json("run.json", facts)
        (self.path / "config.yaml").write_text(yaml.safe_dump(config.as_dict(), sort_keys=False))

    def write_json(self, name: str, value: Any) -> None:
        """Replaces `name` in one move, so a reader never sees half of it."""
        temporary = self.path / f".{name}.{os.getpid()}"
        temporary.write_text(json.dumps(value, indent=1, default=str))
        temporary.replace(self.path / name)

    def append(self, name: str, *records: dict[str, Any]) -> None:
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(record, default=float) + "\n" for record in records))

    def event(self, kind: str, step: int, reason: str, **more: Any) -> dict[str, Any]:
        record = {"event": kind, "step": step, "time": time.time(), "reason": reason, **more}
        self.append(EVENTS, record)
        return record

    def read(self, name: str) -> list[dict[str, Any]]:
        """All whole lines; a line torn by a crash is not one."""
        try:
            text = (self.path / name).read_bytes()
        except FileNotFoundError:
            return []
        lines = text.split(b"\n")[:-1]  # what follows the last newline was not finished
        return [json.loads(line) for line in lines if line.strip()]

    def rewind(self, step: int, next_batch: int) -> None:
        """Back to a checkpoint: keeps what happened up to and including optimizer step `step` (steps count from 1)."""
        self._keep(METRICS, lambda record: record["step"] <= step)
        self._keep(VALIDATION, lambda record: record["step"] <= step)
        self._keep(TRAINED, lambda record: record["batch"] < next_batch)

    def _keep(self, name: str, wanted: Callable[[dict[str, Any]], bool]) -> None:
        path = self.path / name
        if not path.exists():
            return
        kept = [record for record in self.read(name) if wanted(record)]
        temporary = path.with_name(f".{name}.{os.getpid()}")
        temporary.write_text("".join(json.dumps(record, default=float) + "\n" for record in kept))
        temporary.replace(path)
