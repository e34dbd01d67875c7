"""Measure preparation: `python -m jobs.bench prepare [--input FILE ...] [--tokenizer DIR] [--repeats 3] [--json OUT]`.

Each repeat is `jobs.prepare_data` in a process of its own, so that its memory is its own too. Printed are tokens written per second by one
process and the most memory it held. Without --input the quickstart's conversations are prepared, with its tokenizer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from jobs.benchmarks.flags import part_arguments
from jobs.support.paths import require_writable, write_file

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart"


def main(argv: list[str]) -> int:
    parser = part_arguments("prepare", __doc__)
    parser.add_argument("--input", nargs="+", type=Path, default=[QUICKSTART / "train.jsonl"], metavar="FILE|DIR")
    parser.add_argument("--tokenizer", type=Path, default=QUICKSTART / "target", metavar="DIR")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    if args.repeats < 1:
        raise ValueError(f"--repeats {args.repeats}: measure at least once")
    if args.json:
        require_writable("--json", args.json)
    rows = []
    for _ in range(args.repeats):
        rows.append(prepare_once(args.input, args.tokenizer))
        row = rows[-1]
        print(
            f"{row['tokens']:,} tokens in {row['seconds']:.1f} s: {row['tokens_per_second']:,} tokens/s, "
            f"at most {row['peak_memory_bytes'] >> 20} MiB",
            flush=True,
        )
    rate = median(row["tokens_per_second"] for row in rows)
    print(f"median {rate:,.0f} tokens/s, load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    if args.json:
        from dflash_ray.planning import bench

        record = {"job": "prepare", "versions": bench.versions(), "cpus": os.cpu_count(), "load": os.getloadavg()[0]}
        write_file("--json", args.json, json.dumps(record | {"tokens_per_second": rate, "runs": rows}, indent=1))
    return 0


def prepare_once(inputs: list[Path], tokenizer: Path) -> dict[str, Any]:
    """Counts, seconds and memory of one preparation. ValueError with its own message if it refuses the input."""
    with tempfile.TemporaryDirectory(prefix="dflash-ray-bench-") as scratch:
        report = Path(scratch) / "report.json"
        flags = ["--tokenizer", str(tokenizer), "--output", f"{scratch}/data", "--json", str(report), "--input", *map(str, inputs)]
        done = subprocess.run([sys.executable, "-m", "jobs.prepare_data", *flags], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(
                (done.stderr.strip() or f"jobs.prepare_data ended with {done.returncode}").splitlines()[-1].removeprefix("error: ")
            )
        told = json.loads(report.read_text())
    return {name: told[name] for name in ("lines_read", "kept", "tokens", "bytes", "seconds", "tokens_per_second", "peak_memory_bytes")}
