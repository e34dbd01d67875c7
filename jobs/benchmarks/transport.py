"""Measure how features travel between actors: `python -m jobs.bench transport [--tokens N] [--width N] [--sources N] [--json OUT]`.

One message is the features of a batch, bfloat16 [tokens, width]. Object store and direct way, one message at a time and overlapped, from
one source and from several into one receiver; on two GPUs also NCCL, for comparison only. GB/s are payload bytes over wall time, the
receiver's copy to its device included.
"""

from __future__ import annotations

from jobs.benchmarks.flags import part_arguments, write_record


def main(argv: list[str]) -> int:
    parser = part_arguments("transport", __doc__)
    parser.add_argument("--tokens", type=int, help="default 16384 on a GPU, 512 on a CPU")
    parser.add_argument("--width", type=int, help="taps x hidden size; default 25600 on a GPU, 640 on a CPU")
    parser.add_argument("--sources", type=int, default=2, help="most sources that send at the same time")
    parser.add_argument("--messages", type=int, default=12, help="timed messages per row")
    args = parser.parse_args(argv)
    for name in ("tokens", "width", "sources", "messages"):
        value = getattr(args, name)
        if value is not None and value < (2 if name == "messages" else 1):
            raise ValueError(f"--{name}: {value} is too few")

    import torch

    gpu = torch.cuda.is_available()
    args.tokens = args.tokens or (16384 if gpu else 512)
    args.width = args.width or (25600 if gpu else 640)

    from jobs.benchmarks.measure_transport import measure

    write_record(args.json, measure(args))
    return 0
