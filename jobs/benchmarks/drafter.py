"""Measure the drafter: `python -m jobs.bench drafter [--shape NAME] [--json OUT] [--profile OUT]`.

Random weights, features and tokens at the real shape, every token supervised. Counted FLOPs of a micro-step (forward and backward) are
6 x rows x layer parameters + 4 x label rows x H x V + 6 x tokens x (fc + key and value parameters); no attention, no recomputation.
`beyond` is the peak less master weights, float32 gradients, moments, embedding and head. Losses are compared with float64.
"""

from __future__ import annotations

from pathlib import Path

from jobs.benchmarks.flags import part_arguments


def main(argv: list[str]) -> int:
    parser = part_arguments("drafter", __doc__, shape=True)
    parser.add_argument("--repeats", type=int, default=10, help="timed calls per row, after two untimed ones")
    parser.add_argument("--chunk", type=int, help="train.head_chunk, default its own")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--profile", type=Path, help="GPU only: write the time by kernel of one step there")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        raise ValueError(f"--repeats: {args.repeats} times nothing; use at least 1")

    from jobs.benchmarks.measure_drafter import measure_all

    measure_all(args)
    return 0
