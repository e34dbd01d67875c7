"""Train a drafter: `python -m jobs.train --config FILE.yaml [--topology 6-1] [--resume auto] [--a.b value ...]`, alone or under
`ray job submit`. `--dry-run` explains what would run and exits; `--json OUT` also writes the summary there."""

from __future__ import annotations

import json
import sys

from jobs.support import cli
from jobs.support.run_driver import drive, prepare


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        cli.print_settings(f"{__doc__}\n\nEvery setting is a flag:")
        return 0
    dry_run = bool(cli.take_flag(argv, "dry-run", value=False))
    out = cli.take_json(argv)
    config = cli.config_from(argv)
    if dry_run:
        from jobs.support.explain import explain

        report = explain(config)
        code = 0
    else:
        plan = prepare(config)
        report, code = drive(plan)
    if out is not None:
        cli.write_file("--json", out, json.dumps(report, indent=1, default=str))
    return code


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    cli.run(main)
