"""Change the number of targets of a running run: `python -m jobs.scale --targets N [--run DIR]`.

A target that leaves finishes its batch and frees its GPU; what was handed to it goes to the others. The losses do not change. The newest
run in ./runs or ~/dflash_ray/runs is meant unless --run names another.
"""

from __future__ import annotations

from pathlib import Path

from jobs.support import cli


def main(argv: list[str]) -> int:
    parser = cli.Arguments(prog="python -m jobs.scale", description=__doc__)
    parser.add_argument("--targets", type=int, required=True, help="targets from now on, at least 1")
    parser.add_argument("--run", type=Path, help="folder of the run; default: the newest")
    args = parser.parse_args(argv)
    if args.targets < 1:
        raise ValueError(f"--targets {args.targets}: a run needs at least 1")
    from jobs.support.live_run import LiveRun

    with LiveRun(args.run) as run:
        done = run.ask("scale", args.targets)
    print(f"{done['before']} -> {done['targets']} targets at step {done['step']:,}")
    return 0


if __name__ == "__main__":
    cli.run(main)
