"""Lines and a progress bar on the console; without a terminal (a job's log, a pipe) lines alone."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar


class Progress:
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
