"""Where a job reads and writes: the run's folder, paths that mean something on every node, files that can be written.

Whatever is wrong with a path is found before the work that would end in it, and the message names the flag or the setting.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.support.cli import once

if TYPE_CHECKING:
    from dflash_ray.config.schema import Config

JOB_MARK = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets it for the entry point of a submitted job


def under_job_submit() -> bool:
    return JOB_MARK in os.environ


def run_dir(config: Config) -> Path:
    if config.run.dir is not None:
        return Path(config.run.dir).expanduser()
    root = Path.home() / "dflash_ray" if under_job_submit() else Path.cwd()
    return root / "runs" / config.run.name


def require_absolute(**paths: Path | None) -> None:
    """ValueError for a relative path under `ray job submit`, where it would mean a folder that is thrown away. Keys are flag names."""
    for name, path in paths.items():
        if path is not None and _is_thrown_away(path):
            raise ValueError(
                f"--{name.replace('_', '-')} {path}: is relative, and under `ray job submit` the job runs in a temporary copy of "
                "the working directory; give an absolute path that every node sees"
            )


def refuse_relative_paths(config: Config) -> None:
    """The same for the paths of a config."""
    paths = {"run.dir": config.run.dir, "data.path": config.data.path, "target.path": config.target.path}
    for key, path in (paths | {"power.source": config.power.file}).items():
        if path is not None and _is_thrown_away(path):
            raise ValueError(
                f"{key}: {path} is relative, and under `ray job submit` the job runs in a temporary copy of the working directory; "
                "give an absolute path that every node sees"
            )


def _is_thrown_away(path: Path) -> bool:
    return under_job_submit() and not path.expanduser().is_absolute()


def require_writable(flag: str, path: Path) -> None:
    """ValueError where `path` cannot be written: before the work rather than after it."""
    existed = path.exists()
    try:
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise ValueError(f"{flag} {path}: cannot be written: {error.strerror}") from None


def write_file(flag: str, path: Path, text: str) -> None:
    """Writes `text` and a line end. ValueError, with the flag that named the path, where that cannot be done."""
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{flag} {path}: cannot be written: {error.strerror}") from None


def json_file(given: list[Path] | None) -> Path | None:
    """The one file that `--json` names (`action="append"`). ValueError where it cannot be written, before any work is done."""
    path = once("--json", given)
    if path is not None:
        require_absolute(json=path)
        require_writable("--json", path)
    return path
