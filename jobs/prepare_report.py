"""How a preparation shows itself: a progress bar, the counts, and three samples with their supervised part marked."""

from __future__ import annotations

from typing import Any

import rich.progress
from rich.console import Console
from rich.text import Text

from dflash_ray.dataset import open_dataset
from dflash_ray.prepare import Counts, PrepareSettings
from dflash_ray.tokenizer import ChatTokenizer

_SHOWN_CHARACTERS = 400


class Progress:
    """`with Progress() as progress: progress(bytes done, bytes in all, counts)`."""

    def __init__(self):
        self._bar = rich.progress.Progress(
            "preparing",
            rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            "{task.fields[state]}",
            rich.progress.TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("", state="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int, counts: Counts) -> None:
        state = f"{counts.lines_read:,} read, {counts.kept:,} kept, {counts.tokens:,} tokens"
        self._bar.update(self._task, completed=done, total=max(total, 1), state=state)


def print_report(report: dict[str, Any], settings: PrepareSettings) -> None:
    console = Console(highlight=False)
    say = lambda text: console.print(text, markup=False)  # noqa: E731
    if report.get("already_prepared"):
        say(f"{settings.output} was made from exactly this already; nothing to do")
    say(f"{report['lines_read']:,} rows read, {report['kept']:,} kept, {sum(report['skipped'].values()):,} skipped")
    for reason, number in sorted(report["skipped"].items(), key=lambda item: -item[1]):
        say(f"  {number:,} {reason}")
        for place in report["examples"].get(reason, []):
            say(f"      {place}")
