"""Measure the frozen target: `python -m jobs.bench target [--shape NAME] [--precision bf16|fp8|both] [--layers N] [--json OUT]`.

Random weights at the real shape, log-normal document lengths. Packed batches in random order are compared with a uniform (length-sorted)
batch, with padded length buckets and with random padded batches; every row with the matrix-product ceiling of the same run. `both` measures
fp8 on packed batches only: what padding costs does not depend on precision.
"""

from __future__ import annotations

from jobs.benchmarks.flags import part_arguments


def main(argv: list[str]) -> int:
    parser = part_arguments("target", __doc__, shape=True)
    parser.add_argument("--precision", choices=("bf16", "fp8", "both"), default="bf16")
    parser.add_argument("--layers", type=int, help="only the first N layers, for a quick look")
    parser.add_argument("--longest", type=int, help="longest document; default 8192 on a GPU, 256 on a CPU; budgets scale with it")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls per row, after one untimed")
    args = parser.parse_args(argv)

    from jobs.benchmarks.measure_target import measure_all

    measure_all(args)
    return 0
