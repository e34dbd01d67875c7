"""How many targets for a drafter: throughput, who waits, power, days and GPU-hours of 1..N targets.

python -m jobs.plan_topology --run DIR                                        rates measured by a run
python -m jobs.plan_topology --bench TARGET.json --bench DRAFTER.json         by `jobs.bench target|drafter|pipeline --json`
python -m jobs.plan_topology --measured 6-1=30000 --measured 7-1=27000        from the speed of whole runs
python -m jobs.plan_topology --target-rate 5000 --drafter-rate 30000          given
python -m jobs.plan_topology --config FILE.yaml [--a.b value ...]             the model's arithmetic, on any machine

Sources can be joined; what is more direct counts: given, measured, bench, run, arithmetic. A run has exactly one drafter today: the
tables of more drafters are arithmetic, and what drafters would exchange is not in it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_ray.planning.balance import WAITING_SHARE, Power, point, rates_behind, recommend
from jobs.support import cli, paths

if TYPE_CHECKING:
    from dflash_ray.planning.stage_rates import Known

MOST_TARGETS = 4096
MOST_RATE = 1e15  # of what a flag gives: tokens, tokens/s, watts


def main(argv: list[str]) -> int:
    args, settings = _parser().parse_known_args(argv)
    for flag in ("json", "plot"):
        path = getattr(args, flag)
        if path is not None:
            paths.require_writable(f"--{flag}", path)
    measured = dict(_measured(text) for text in args.measured)
    known = gather(args, settings, measured)
    rates = known.rates()
    tables = {m: [point(rates, n, m, known.tokens) for n in range(1, args.targets + 1)] for m in args.drafters}
    best = recommend((one for m in args.drafters if m == min(args.drafters) for one in tables[m]), args.gpus)
    from rich.console import Console

    from jobs.support.tables.topology import as_json, make_table, say_inputs, say_result

    console = Console(highlight=False, soft_wrap=True)
    say_inputs(console, known, rates)
    for drafters, points in tables.items():
        console.print(make_table(drafters, points, known, rates, best, measured))
    if best is None:
        raise ValueError(f"--gpus {args.gpus}: a target and a drafter need 2")
    say_result(console, known, rates, best, measured, args.gpus, args.balance)
    if args.plot is not None:
        from dflash_ray.planning.plots import plot_topology

        try:
            plot_topology(tables, best, measured, args.plot)
        except (OSError, ValueError) as error:
            raise ValueError(f"--plot {args.plot}: cannot be written: {error}") from None
    if args.json is not None:
        paths.write_file("--json", args.json, json.dumps(as_json(known, rates, tables, best, measured), indent=1))
    return 0


def gather(args: argparse.Namespace, settings: list[str], measured: dict[int, float]) -> Known:
    """Everything that is known, from the least direct source to the most direct."""
    from dflash_ray.planning.stage_rates import Known, of_arithmetic, of_bench, of_run

    known = Known()
    if args.config or args.resume or args.fresh or settings:
        from dflash_ray.run.spec import resolve

        spec = resolve(cli.config_of(args, settings), device="cuda", run_dir=Path("."))
        known = of_arithmetic(spec, args.tflops * 1e12, args.target_share, args.drafter_share)
    if args.run is not None:
        known = of_run(args.run).over(known)
    for path in args.bench:
        known = of_bench(path).over(known)
    if measured:
        rates, sentence = rates_behind(measured)
        known = Known(target=rates.target, drafter=rates.drafter, said=(f"measured runs: {sentence}",)).over(known)
    given = Known(args.target_rate, args.drafter_rate, power=_power(args), tokens=args.tokens, tokens_per_anchor=args.tokens_per_anchor)
    return given.over(known)


def _power(args: argparse.Namespace) -> Power | None:
    if args.target_watts is None and args.drafter_watts is None:
        if args.waiting_watts is not None or args.host_watts:
            raise ValueError("--waiting-watts and --host-watts need --target-watts or --drafter-watts beside them")
        return None
    target = args.target_watts or args.drafter_watts
    waiting = WAITING_SHARE * target if args.waiting_watts is None else args.waiting_watts
    return Power(target, args.drafter_watts or target, waiting, args.host_watts)


def _measured(text: str) -> tuple[int, float]:
    topology, _, rate = text.partition("=")
    targets, _, drafters = topology.partition("-")
    try:
        number, value = int(targets), float(rate)
        if drafters == "1" and 1 <= number <= MOST_TARGETS and 0 < value < MOST_RATE:
            return number, value
    except ValueError:
        pass
    raise ValueError(f"--measured {text}: give TARGETS-1=TOKENS_PER_SECOND of a whole run, for instance 6-1=30000")


def _parser() -> cli.ConfigArguments:
    parser = cli.ConfigArguments(
        prog="python -m jobs.plan_topology", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--run", type=Path, metavar="DIR", help="folder of a run")
    add(
        "--bench",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="record of jobs.bench target, drafter, pipeline; repeatable",
    )
    add("--measured", action="append", default=[], metavar="N-1=R", help="tokens/s of a whole run with that topology; repeatable")
    add("--target-rate", type=_positive, metavar="R", help="real tokens/s of one target")
    add("--drafter-rate", type=_positive, metavar="R", help="real tokens/s of one drafter")
    add("--tokens-per-anchor", type=_positive, metavar="K", help="default: the run's or the config's")
    add("--tokens", type=_positive, metavar="N", help="tokens to train on in all, epochs included; default: the config's data")
    add("--targets", type=_count, default=32, metavar="N", help="rows of a table (default %(default)s)")
    add("--drafters", type=_counts, default=[1, 2], metavar="M,M", help="a table for each (default 1,2)")
    add("--gpus", type=_count, metavar="G", help="recommend within this many GPUs")
    add("--balance", type=_count, metavar="N", help="say which anchors balance N targets; default: the recommended ones")
    add("--target-watts", type=_positive, metavar="W", help="of a GPU that works; default: what the run measured")
    add("--drafter-watts", type=_positive, metavar="W")
    add("--waiting-watts", type=_positive, metavar="W", help=f"of a GPU that waits; default {WAITING_SHARE:g} of a target's, assumed")
    add("--host-watts", type=_not_negative, default=0.0, metavar="W", help="of everything else in the host")
    add(
        "--tflops",
        type=_positive,
        default=676.0,
        help="arithmetic: bf16 TFLOP/s a GPU keeps up (default %(default)g: H200, docs/gpu.md)",
    )
    add("--target-share", type=_positive, default=0.93, help="arithmetic: of it a target reaches (default %(default)g, docs/gpu.md)")
    add("--drafter-share", type=_positive, default=0.92, help="arithmetic: of it a drafter reaches (default %(default)g, docs/gpu.md)")
    add("--plot", type=Path, metavar="OUT.png", help="draw throughput over targets here")
    add("--json", type=Path, metavar="OUT", help="write all figures here")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < MOST_RATE:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and below {MOST_RATE:g}")
    return value


def _not_negative(text: str) -> float:
    return 0.0 if float(text) == 0 else _positive(text)


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MOST_TARGETS:
        raise argparse.ArgumentTypeError(f"{text} is outside 1..{MOST_TARGETS}")
    return value


def _counts(text: str) -> list[int]:
    return sorted({_count(part) for part in text.split(",")})


if __name__ == "__main__":
    cli.run(main)
