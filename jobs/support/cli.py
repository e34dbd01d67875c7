"""What every job's command line shares: one parser, one line for a user's mistake, and exit codes that mean something.

0 done, 1 failed while running, 2 the user's input, 130 and 143 stopped by Ctrl-C and SIGTERM. Nothing is imported before the flags are
read but what reading them needs, so that `--help` and a mistake are answered at once.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from dflash_ray.config.schema import Config


class Stopped(BaseException):
    """SIGTERM arrived; like KeyboardInterrupt, not an Exception."""


class Failed(Exception):
    """Not the user's mistake, and nothing that a traceback would explain: one line, exit code 1."""


class Arguments(argparse.ArgumentParser):
    """A job's flags. A mistake in them is a ValueError like any other; no flag may be abbreviated."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        flag, _, what = message.removeprefix("argument ").partition(": ")
        if what == "expected one argument":
            raise ValueError(f"{flag}: a value is missing after it")
        if what.startswith("ignored explicit argument"):
            raise ValueError(f"{flag} takes no value")
        raise ValueError(f"{message} (see {self.prog} --help)")


class ConfigArguments(Arguments):
    """Flags of a job that takes a run's config: its own, three short ones, and every setting as `--a.b VALUE`.

    `parse_known_args` leaves the settings over, for `config_of`: a value that begins with - would be a flag to argparse.
    """

    def __init__(self, *, list_settings: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self._list_settings = list_settings  # in --help
        self.add_argument("--config", action="append", default=[], metavar="FILE.yaml", help="settings; later files and flags win")
        # a job that starts no run takes these two as well, so that one command line serves several jobs, but does not list them
        resume, fresh = ("short for --run.resume", "short for --run.fresh true") if list_settings else (argparse.SUPPRESS,) * 2
        self.add_argument("--resume", action="append", metavar="auto|DIR", help=resume)
        self.add_argument("--fresh", action="store_true", help=fresh)

    def print_help(self, file: IO[str] | None = None) -> None:
        super().print_help(file)
        if self._list_settings:
            print("\nEvery setting is a flag:", file=file)
            _print_settings(file)


def config_of(args: argparse.Namespace, settings: list[str]) -> Config:
    """The config of the files, the short flags and the settings that `parse_known_args` left over."""
    from dflash_ray.config.loading import load_config

    short: dict[str, Any] = {}
    if args.resume:
        short["resume"] = once("--resume", args.resume)
    if args.fresh:
        short["fresh"] = True
    return load_config([Path(path) for path in args.config], settings, {"run": short} if short else {})


def once(flag: str, values: list[Any] | None) -> Any:
    """The value of a flag that collects (`action="append"`), None where it was not given; ValueError where it was given again."""
    if values and len(values) > 1:
        raise ValueError(f"{flag} is given {len(values)} times; give it once")
    return values[0] if values else None


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


def _print_settings(file: IO[str] | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from dflash_ray.config.loading import describe_settings

    settings = describe_settings()
    table = Table("setting", "default", "meaning", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    table.columns[0].min_width = max(len(name) for name, _, _ in settings) + 2
    for column in table.columns:
        column.overflow = "fold"  # a name or a value cut off cannot be copied
    for name, default, description in settings:
        table.add_row("--" + name, default, description)
    Console(file=file).print(table)
