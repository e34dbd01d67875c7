"""A running run as its driver sees it: the coordinator's lines on the console, the user's signals to the coordinator."""

from __future__ import annotations

import signal
import sys
from typing import Any

import ray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from jobs.support.cli import Stopped

SILENCE, MOST_SILENT = 60, 5  # seconds without an answer of the coordinator, and how often before it counts as hung


class CoordinatorHangs(Exception):
    """It answers no more; says for how long."""


def follow(coordinator: Any) -> int:
    """Prints the coordinator's lines until it ends. Returns 0, or 130 / 143 if a signal ended it."""
    shown, told, silent = 0, False, 0
    with Signals() as signals, Progress() as progress:
        while True:
            if signals.first is not None and not told:
                told = True
                name = signal.Signals(signals.first).name
                progress.say(f"{name}: finishing the step, then a checkpoint; once more ends at once, without one")
                coordinator.stop.remote(f"stopped by {name}")
            try:
                report = ray.get(coordinator.reports.remote(shown, 0.5), timeout=SILENCE)
                silent = 0
            except ray.exceptions.GetTimeoutError:
                silent += 1
                if silent == MOST_SILENT:
                    raise CoordinatorHangs(f"the coordinator has not answered for {silent * SILENCE} s") from None
                progress.say(f"the coordinator has not answered for {silent * SILENCE} s; waiting on")
                continue
            for line in report["lines"]:
                progress.say(line)
            shown += len(report["lines"])
            progress.show(report["step"], report["steps"])
            if report["ended"]:
                return 128 + signals.first if told and not report["finished"] else 0


class Signals:
    """The first Ctrl-C or SIGTERM asks for a checkpoint, the second one ends at once."""

    def __init__(self) -> None:
        self.first: int | None = None

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._on) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _on(self, number: int, _frame: Any) -> None:
        if self.first is not None:
            raise KeyboardInterrupt if number == signal.SIGINT else Stopped
        self.first = number

    def __exit__(self, *_exc: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Progress:
    """Lines and a progress bar; without a terminal (a job's log, a pipe) lines alone."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self._bar = Bar(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=self.console, transient=True
        )
        self._task: Any = None

    def __enter__(self) -> Progress:
        if sys.stdout.isatty():
            self._task = self._bar.add_task("steps", total=None)
            self._bar.start()
        return self

    def __exit__(self, *_exc: Any) -> None:
        if self._task is not None:
            self._bar.stop()

    def say(self, line: str) -> None:
        self.console.print(line, markup=False)

    def show(self, step: int, steps: int) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=step, total=steps or None)
