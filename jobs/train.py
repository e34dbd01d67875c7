"""Train a drafter: `python -m jobs.train --config FILE.yaml [--topology 6-1] [--resume auto] [--a.b value ...]`, alone or under
`ray job submit`. `--dry-run` explains what would run and exits; `--json OUT` also writes the summary there."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from jobs.support import cli, paths


def main(argv: list[str]) -> int:
    parser = cli.ConfigArguments(
        prog="python -m jobs.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, list_settings=True
    )
    parser.add_argument("--dry-run", action="append_const", const=True, help="explain what would run, and exit")
    parser.add_argument("--json", type=Path, action="append", metavar="OUT", help="write the summary there too")
    args, settings = parser.parse_known_args(argv)
    dry_run, out = cli.once("--dry-run", args.dry_run), paths.json_file(args.json)
    config = cli.config_of(args, settings)
    if dry_run:
        from jobs.support.explain import explain

        report, code = explain(config), 0
    else:
        from jobs.support.run_driver import drive, prepare

        report, code = drive(prepare(config))
    if out is not None:
        paths.write_file("--json", out, json.dumps(report, indent=1, default=str))
    return code


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    cli.run(main)
