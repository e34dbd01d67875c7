"""The report's HTML: one file that needs nothing else.

Its charts are drawn in the browser (`chart.js`): they answer the pointer, share one crosshair, change their axis and follow the window's
width and the system's colours. matplotlib's pictures do none of that, and a package that does weighs megabytes in every page.
"""

from __future__ import annotations

import html
import json
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from string import Template

from dflash_ray.watch.report.gather import gather


def report_html(folders: list[Path]) -> str:
    """A page about the runs in `folders`, in this order. ValueError for a folder without a run."""
    runs = [gather(folder) for folder in folders]
    _tell_apart(runs, folders)
    data = json.dumps(runs, allow_nan=False, separators=(",", ":"))
    return Template(_part("page.html")).substitute(
        title=html.escape(", ".join(run["name"] for run in runs)),
        style=_part("page.css"),
        script=_part("chart.js") + _part("page.js"),
        data=data.replace("<", "\\u003c"),  # nothing in a run's own text may end the script element
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _tell_apart(runs: list[dict], folders: list[Path]) -> None:
    """Runs of the same folder name get the parent's name before it."""
    names = [run["name"] for run in runs]
    for run, folder in zip(runs, folders, strict=True):
        if names.count(run["name"]) > 1:
            run["name"] = f"{folder.resolve().parent.name}/{run['name']}"


def _part(name: str) -> str:
    return (files("dflash_ray.watch.report") / name).read_text(encoding="utf-8")
