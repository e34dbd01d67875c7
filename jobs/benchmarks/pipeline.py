"""Measure a whole run: `python -m jobs.bench pipeline [--shape NAME] [--topology 1-1] [--seconds N] [--tokens-per-anchor X] [--json OUT]`.

First each side alone (the real actors, one after the other, on the first batches of the run), then a real run of all of them on random
weights and documents of natural lengths. Compared: the run's real tokens per second and those of the slower side alone. The first tenth
of the run is left out. Memory is sampled twice a second; power is the GPUs' own energy counter. Every setting of a run is a flag too.
"""

from __future__ import annotations

import sys

from jobs.benchmarks.flags import part_arguments


def main(argv: list[str]) -> int:
    parser = part_arguments("pipeline", __doc__, shape=True)
    parser.add_argument("--topology", default="1-1")
    parser.add_argument("--seconds", type=float, help="about how long the run takes; default 180 on a GPU, 5 on a CPU")
    parser.add_argument("--tokens-per-anchor", type=float, nargs="+", default=[43.0], help="one run for each")
    parser.add_argument("--token-budget", type=int, help="default 16384 on a GPU, 512 on a CPU")
    parser.add_argument("--transport", choices=("auto", "direct", "object_store"), default="auto")
    args, settings = parser.parse_known_args(argv)
    if args.seconds is not None and args.seconds <= 0:
        raise ValueError(f"--seconds: {args.seconds:g} is no time; use at least 1")

    from actors.answers import RunFailed
    from jobs.benchmarks.measure_pipeline import measure_all

    try:
        measure_all(args, settings)
    except RunFailed as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0
