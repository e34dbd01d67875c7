"""Measure what coordination costs: `python -m jobs.bench coordinator [--targets 8] [--batches 4000] [--json OUT]`.

Two rows. `flow`: the bookkeeping alone, in one process, with 256 targets that answer at once. `coordinator`: the real coordinator with
real actor processes that compute nothing; batches per second, and CPU time of the coordinator's whole process per batch.
"""

from __future__ import annotations

from jobs.benchmarks.flags import part_arguments, write_record

WARM = 200  # batches before counting begins


def main(argv: list[str]) -> int:
    parser = part_arguments("coordinator", __doc__)
    parser.add_argument("--targets", type=int, default=8)
    parser.add_argument("--batches", type=int, default=4000, help="of the coordinator's run")
    args = parser.parse_args(argv)
    for name, value, least in (("targets", args.targets, 1), ("batches", args.batches, 2 * WARM)):
        if value < least:
            raise ValueError(f"--{name} {value}: give at least {least}")

    from jobs.benchmarks.measure_coordinator import measure

    write_record(args.json, measure(args.targets, args.batches, WARM))
    return 0
