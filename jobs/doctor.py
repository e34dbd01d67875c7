"""Looks at everything a run needs before a GPU-day is spent: `python -m jobs.doctor [--config FILE.yaml] [--a.b value ...] [--json OUT]`.

Takes the settings of `jobs.train`. Without target.path only the machine is looked at. Exit code 1 if something would make the run fail;
every such finding, and every warning, says what to do.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_ray.doctor.finding import Finding, blockers
from jobs.support import cli, paths

if TYPE_CHECKING:
    from dflash_ray.config.schema import Config
    from dflash_ray.run.spec import RunSpec

STYLE = {"ok": "green", "n/a": "dim", "warning": "yellow", "blocker": "bold red"}


def main(argv: list[str]) -> int:
    parser = cli.ConfigArguments(
        prog="python -m jobs.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, list_settings=True
    )
    parser.add_argument("--json", type=Path, action="append", metavar="OUT", help="write the findings there too")
    args, settings = parser.parse_known_args(argv)
    out = paths.json_file(args.json)
    findings = look(cli.config_of(args, settings))
    show(findings)
    if out is not None:
        paths.write_file("--json", out, json.dumps([finding.as_dict() for finding in findings], indent=1))
    return 1 if blockers(findings) else 0


def look(config: Config) -> list[Finding]:
    from actors.placement import gpus_wanted
    from dflash_ray.doctor.which_checks import machine_findings, run_findings
    from jobs.support.explain import plan_sizes

    spec, about = _spec(config)
    wanted = gpus_wanted(config.targets, config.placement.gpus_per_target, config.placement.gpus_per_drafter)
    findings = machine_findings(spec, config.tracking.kind, config.topology, wanted) + about
    if spec is None:
        return findings
    try:
        sizes = plan_sizes(spec)
    except ValueError:  # the data's own finding says what is wrong; the largest batch that the settings allow is looked at instead
        budget = config.batching.token_budget
        sizes = {"most_tokens": budget, "most_anchors": round(budget / config.anchors.tokens_per_anchor) + config.batching.max_rows}
    return findings + run_findings(spec, sizes)


def _spec(config: Config) -> tuple[RunSpec | None, list[Finding]]:
    if config.target.path is None and config.target.shape is None:
        return None, [Finding("run", "n/a", "no target.path: only the machine was looked at")]
    import torch

    from dflash_ray.run.spec import resolve

    device = "cuda" if torch.cuda.is_available() or config.hardware.gpu_memory_gib else "cpu"
    try:
        return resolve(config, device=device, run_dir=paths.run_dir(config)), []
    except ValueError as error:
        return None, [Finding("run", "blocker", str(error), "change this setting; nothing else of the run was looked at")]


def show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(f"[{STYLE[finding.level]}]{finding.level}[/]", finding.check, _plain(finding.what))
        if finding.do:
            table.add_row("", "", _plain(f"-> {finding.do}"), style="bold")
    console = Console()
    console.print(table)
    found = blockers(findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    console.print(
        f"{len(found)} blocker{'' if len(found) == 1 else 's'}, {warnings} warning{'' if warnings == 1 else 's'}", highlight=False
    )


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    cli.run(main)
