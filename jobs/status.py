"""Look at a running run from another shell: `python -m jobs.status [--watch] [--json] [--run DIR]`.

The coordinator answers from memory, whatever the others do. `--json` prints one object (with --watch one a second, each on its own
line). The newest run in ./runs or ~/dflash_ray/runs is meant unless --run names another.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dflash_ray.run.place import RunEnded
from dflash_ray.watch.console import duration
from jobs.support import cli

EVERY_SECONDS = 1.0
FILE_WIDTH = 160  # columns, where the output is no terminal
SILENT_SECONDS = 5.0  # an actor that says nothing for longer is shown as such


def main(argv: list[str]) -> int:
    parser = cli.Arguments(prog="python -m jobs.status", description=__doc__)
    parser.add_argument("--watch", action="store_true", help="again every second, until Ctrl-C or the end of the run")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--run", type=Path, help="folder of the run; default: the newest")
    args = parser.parse_args(argv)
    from jobs.support.live_run import LiveRun

    with LiveRun(args.run) as run:
        status = _ask(run)
        if not args.watch:
            _show(status, args.json)
            return 0
        try:
            _watch(run, status, args.json)
        except RunEnded as end:
            print(end, file=sys.stderr)
    return 0


def _watch(run: Any, status: dict[str, Any], as_json: bool) -> None:
    with nullcontext() if as_json else Live(view(status), refresh_per_second=4) as live:
        while True:
            if as_json:
                print(json.dumps(status), flush=True)
            else:
                live.update(view(status))
            time.sleep(EVERY_SECONDS)
            status = _ask(run)


def _ask(run: Any) -> dict[str, Any]:
    began = time.perf_counter()
    status = run.ask("status")
    return {"run": str(run.place.folder), **status, "answered_in_seconds": time.perf_counter() - began}


def _show(status: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(status, indent=1))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=FILE_WIDTH)
        console.print(view(status))


def view(status: dict[str, Any]) -> Group:
    """A `status` of the coordinator, as a table and three lines."""
    table = Table(box=None, pad_edge=False)
    for name in ("actor", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("node", overflow="ellipsis", no_wrap=True)
    for name in ("GPU", "pid", "restarts", "batches", "tokens/s", "q_pre", "memory", "GPU memory", "power"):
        table.add_column(name, justify="right", no_wrap=True)
    for actor in status["actors"]:
        state = actor["state"]
        if (actor["silent_seconds"] or 0) > SILENT_SECONDS:
            state += f", silent for {actor['silent_seconds']:.0f} s"
        style = "" if actor["state"] == "working" and state == actor["state"] else "yellow"
        table.add_row(
            actor["name"],
            Text(state, style),
            _text(actor.get("node")),
            _text(actor.get("gpu")),
            _text(actor.get("pid")),
            _text(actor.get("restarts")),
            _text(actor.get("batches"), "{:,}"),
            _text(actor.get("tokens_per_second"), "{:,.0f}"),
            _text(actor.get("q_pre")),
            _text(_gib(actor.get("rss_bytes")), "{:.2f} GiB"),
            _text(_gib(actor.get("gpu_bytes")) or None, "{:.1f} GiB"),
            _text(actor["watts"], "{:,.0f} W"),
        )
    return Group(table, Text(_queues(status)), Text(_progress(status)))


def _text(value: Any, form: str = "{}") -> str:
    return "" if value is None or value == "" else form.format(value)


def _gib(size: int | None) -> float | None:
    return None if size is None else size / 2**30


def _queues(status: dict[str, Any]) -> str:
    queues = status["queues"]
    if not queues:
        return ""
    return (
        f"q_pre=[{' '.join(map(str, queues['q_pre']))}] ahead={queues['ahead']} q_hs=[{queues['q_hs']}] "
        f"window {queues['window']} batches, {queues['window_bytes'] / 1e6:,.0f} of {queues['window_bytes_limit'] / 1e6:,.0f} MB"
    )


def _progress(status: dict[str, Any]) -> str:
    last, power = status["last_step"], status.get("power", {})
    parts = [f"{status['state']}: step {status['step']:,}/{status['steps']:,}"]
    if last:
        parts.append(f"loss {last['loss']:.3f} tau {last['tau']:.2f}")
        parts.append(f"{last['real_tokens_per_second']:,.0f} tokens/s")
        parts.append(f"wait: drafter {100 * last['drafter_wait']:.0f}% targets {100 * last['target_wait']:.0f}%")
    if power.get("watts") is not None:
        budget = f" of {power['budget_watts']:,.0f} W" if power["budget_watts"] else ""
        joule = f" {last['tokens_per_joule']:.1f} tok/J" if last.get("tokens_per_joule") is not None else ""
        parts.append(f"{power['watts']:,.0f} W{budget}{joule}")
    if status.get("set_aside"):
        parts.append(f"{status['set_aside']} batches set aside")
    if last:
        parts.append(f"ETA {duration(last['eta_seconds'])}")
    return " | ".join(parts) + f"\n{status['run']}"


if __name__ == "__main__":
    cli.run(main)
