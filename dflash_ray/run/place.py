"""Where runs lie, and where one lives while it lives: what another shell needs to find it."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_ray.records import COUNT, MAPPING, TEXT, TEXTS, TIME, Record, key, or_null


class RunEnded(ValueError):
    """Asked of a run that has ended; says how."""


@dataclass(frozen=True, kw_only=True)
class RunInfo(Record):
    """run.json: where a run lives while it lives, and what it was started with. `started` is in seconds since 1970."""

    ray_address: str = key(("HOST:PORT", lambda value: isinstance(value, str) and value.rpartition(":")[2].isdigit()))
    namespace: str = key(TEXT)
    coordinator: str = key(TEXT)  # its actor's name
    actors: list[str] = key(TEXTS)
    ray_auth_mode: str | None = key(or_null(TEXT))  # another shell needs it to speak to this Ray
    pid: int = key(COUNT)  # of the driver
    node: str = key(TEXT)  # of the driver
    started: float = key(TIME)
    environment: dict[str, Any] = key(MAPPING)  # `machine.environment`


@dataclass(frozen=True)
class RunPlace:
    folder: Path
    info: RunInfo
    summary: dict[str, Any] | None  # if it has ended by itself

    @property
    def driver_is_dead(self) -> bool:
        """True only where this can be known: on the node of the driver."""
        return self.info.node == socket.gethostname() and not Path(f"/proc/{self.info.pid}").exists()

    def problem(self, otherwise: str) -> ValueError:
        """How the run ended, as far as its folder tells; what was seen, `otherwise`."""
        if self.summary is None:
            if self.driver_is_dead:
                return RunEnded(f"the run in {self.folder} has ended without a summary; continue it with --resume auto")
            return ValueError(otherwise)
        if "failed" in self.summary:
            return RunEnded(f"the run in {self.folder} has failed: {self.summary['failed']}")
        how = "finished" if self.summary.get("finished") else "stopped"
        return RunEnded(f"the run in {self.folder} has ended: {how} after {self.summary.get('steps', 0):,} steps")

    def reachable(self, limit: float = 2.0) -> bool:
        """Whether somebody listens at the run's Ray address."""
        host, _, port = self.info.ray_address.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=limit):
                return True
        except OSError:
            return False


def newest_run(roots: tuple[Path, ...] | None = None) -> Path:
    """The run folder that was started last, of ./runs and ~/dflash_ray/runs. ValueError if there is none."""
    roots = roots or (Path.cwd() / "runs", Path.home() / "dflash_ray" / "runs")
    found = [path for root in roots for path in root.glob("*/run.json")]
    if not found:
        raise ValueError(f"--run: no run in {' or '.join(map(str, roots))}; give the run's folder")
    return max(found, key=lambda path: path.stat().st_mtime).parent


def run_place(folder: Path) -> RunPlace:
    """Reads the folder of a run. ValueError where there is none."""
    try:
        values = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        info = RunInfo.from_json(values, "run.json", "ray_address", "namespace", "coordinator", "pid", "node")
    except FileNotFoundError:
        raise ValueError(f"--run {folder}: holds no run (no run.json)") from None
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"--run {folder}: run.json cannot be read: {str(error).splitlines()[0]}") from None
    return RunPlace(folder, info, _summary(folder))


def _summary(folder: Path) -> dict[str, Any] | None:
    """The summary of this run, not of the one before it in the same folder."""
    path = folder / "summary.json"
    try:
        if path.stat().st_mtime < (folder / "run.json").stat().st_mtime:
            return None
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
