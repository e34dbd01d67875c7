"""What the parts of jobs.bench share: how their flags begin, and how their record is written."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dflash_ray.target.known_shapes import SHAPES
from jobs.support.cli import Arguments


def part_arguments(part: str, about: str | None, *, shape: bool = False) -> Arguments:
    """A parser with `--json` and, where the part measures one, `--shape`. `about` is what its help says."""
    parser = Arguments(prog=f"python -m jobs.bench {part}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if shape:
        parser.add_argument("--shape", choices=sorted(SHAPES), help="default qwen3.6-27b on a GPU, tiny-hybrid on a CPU")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the record here")
    return parser


def default_shape(gpu: bool) -> str:
    return "qwen3.6-27b" if gpu else "tiny-hybrid"


def write_record(path: Path | None, record: dict[str, Any]) -> None:
    """Writes it where a path was given, and makes its folder."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1))
