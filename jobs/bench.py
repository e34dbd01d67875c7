"""Measure a part of training on this machine: `python -m jobs.bench PART [--shape NAME] [--json OUT]`; PART is one of prepare, target,
drafter, coordinator, transport and pipeline.

Each part is a job of its own and has its own `--help`. All run on a CPU too, with a tiny shape.
"""

from __future__ import annotations

import importlib
import sys

from jobs.support import cli

PARTS = ("prepare", "target", "drafter", "coordinator", "transport", "pipeline")


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if argv else 2
    part, *rest = argv
    if part not in PARTS:
        raise ValueError(f"{part!r} is no part of training to measure; use one of {', '.join(PARTS)}")
    return importlib.import_module(f"jobs.benchmarks.{part}").main(rest)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    cli.run(main)
