"""What every job's command line shares: one line for a user's mistake, and exit codes that mean something.

0 done, 1 failed while running, 2 the user's input, 130 and 143 stopped by Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.table import Table

from dflash_ray.config.loading import describe_settings, load_config
from dflash_ray.config.schema import Config

JOB_MARK = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets it for the entry point of a submitted job


class Stopped(BaseException):
    """SIGTERM arrived; like KeyboardInterrupt, not an Exception."""


class Failed(Exception):
    """Not the user's mistake, and nothing that a traceback would explain: one line, exit code 1."""


class Arguments(argparse.ArgumentParser):
    """Flags of a job without a config. A mistake in them is a ValueError like any other; no flag may be abbreviated."""

    def __init__(self, **settings) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def run(main: Callable[[list[str]], int]) -> None:
    """Runs `main(argv)` and exits with its code. A ValueError is the user's: one line on stderr and 2."""

    def on_term(_signal, _frame):
        raise Stopped

    signal.signal(signal.SIGTERM, on_term)
    try:
        code = main(sys.argv[1:])
    except ValueError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        code = 2
    except Failed as error:
        print("failed: " + " ".join(str(error).split()), file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    except Stopped:
        code = 143
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe (head, less) has left; nothing more can be said
        code = 0
    sys.exit(code)


def under_job_submit() -> bool:
    return JOB_MARK in os.environ


def require_absolute(**paths: Path | None) -> None:
    """ValueError for a relative path under `ray job submit`, where it would mean a folder that is thrown away. Keys are flag names."""
    for name, path in paths.items():
        if path is not None and under_job_submit() and not path.expanduser().is_absolute():
            raise ValueError(
                f"--{name.replace('_', '-')} {path}: is relative, and under `ray job submit` the job runs in a temporary copy of "
                "the working directory; give an absolute path that every node sees"
            )


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


def take_flag(argv: list[str], name: str, *, repeat: bool = False, value: bool = True) -> list[str]:
    """Removes `--name VALUE`, `--name=VALUE` (or, without `value`, a bare `--name`) from `argv` and returns the values."""
    out: list[str] = []
    position = 0
    while position < len(argv):
        flag, has_equals, given = argv[position].partition("=")
        if flag != f"--{name}":
            position += 1
            continue
        if not value:
            if has_equals:
                raise ValueError(f"--{name} takes no value")
            out.append("")
            del argv[position]
            continue
        if not has_equals:
            if position + 1 >= len(argv) or argv[position + 1].startswith("--"):
                raise ValueError(f"--{name}: a value is missing after it")
            given = argv[position + 1]
            del argv[position + 1]
        out.append(given)
        del argv[position]
    if len(out) > 1 and not repeat:
        raise ValueError(f"--{name} is given {len(out)} times; give it once")
    return out


def take_json(argv: list[str]) -> Path | None:
    """Removes `--json OUT` from `argv`. ValueError where OUT cannot be written, before any work is done."""
    given = take_flag(argv, "json")
    if not given:
        return None
    path = Path(given[0])
    require_absolute(json=path)
    require_writable("--json", path)
    return path


def config_from(argv: list[str]) -> Config:
    """The config of `--config FILE ...`, the short flags and the dotted flags in `argv`, all of which it consumes."""
    files = [Path(path) for path in take_flag(argv, "config", repeat=True)]
    overrides: dict = {}
    if resume := take_flag(argv, "resume"):
        overrides.setdefault("run", {})["resume"] = resume[0]
    if take_flag(argv, "fresh", value=False, repeat=True):
        overrides.setdefault("run", {})["fresh"] = True
    return load_config(files, argv, overrides)


def print_settings(usage: str) -> None:
    """`--help` of the jobs that take a config."""
    console = Console()
    console.print(usage, highlight=False, markup=False)
    table = Table("setting", "default", "meaning", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    table.columns[0].min_width = max(len(name) for name, _, _ in describe_settings()) + 2
    for column in table.columns:
        column.overflow = "fold"  # a name or a value cut off cannot be copied
    for name, default, description in describe_settings():
        table.add_row("--" + name, default, description)
    console.print(table)
