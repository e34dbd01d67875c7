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
from typing import Any

from rich.console import Console
from rich.table import Table

from dflash_ray.planning.balance import Point, Power, Rates, point, rates_behind, recommend
from dflash_ray.planning.stage_rates import WAITING_SHARE, Known, of_arithmetic, of_bench, of_run
from jobs.support import cli

MOST_TARGETS = 4096
MOST_RATE = 1e15  # of what a flag gives: tokens, tokens/s, watts


def main(argv: list[str]) -> int:
    args, rest = _parser().parse_known_args(argv)
    for flag in ("json", "plot"):
        path = getattr(args, flag)
        if path is not None:
            cli.require_writable(f"--{flag}", path)
    measured = dict(_measured(text) for text in args.measured)
    known = gather(args, rest, measured)
    rates = known.rates()
    tables = {m: [point(rates, n, m, known.tokens) for n in range(1, args.targets + 1)] for m in args.drafters}
    best = recommend((one for m in args.drafters if m == min(args.drafters) for one in tables[m]), args.gpus)
    console = Console(highlight=False, soft_wrap=True)
    say_inputs(console, known, rates)
    for drafters, points in tables.items():
        console.print(make_table(drafters, points, known, rates, best, measured))
    say_result(console, known, rates, best, args, measured)
    if args.plot is not None:
        from dflash_ray.planning.plots import plot_topology

        try:
            plot_topology(tables, best, measured, args.plot)
        except (OSError, ValueError) as error:
            raise ValueError(f"--plot {args.plot}: cannot be written: {error}") from None
    if args.json is not None:
        cli.write_file("--json", args.json, json.dumps(as_json(known, rates, tables, best, measured), indent=1))
    return 0


def gather(args: argparse.Namespace, rest: list[str], measured: dict[int, float]) -> Known:
    """Everything that is known, from the least direct source to the most direct."""
    known = Known()
    if rest:
        from dflash_ray.run.spec import resolve

        config = cli.config_from(rest)
        spec = resolve(config, device="cuda", run_dir=Path("."))
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


def say_inputs(console: Console, known: Known, rates: Rates) -> None:
    for sentence in known.said:
        console.print(sentence, markup=False)
    if rates.power is None:
        console.print("power: not known; give --target-watts, or a run that measured it")
    if not known.tokens:
        console.print("days: not known; give --tokens, all epochs together")
    console.print(
        f"one target makes {rates.target:,.0f} tokens/s, one drafter takes {rates.drafter:,.0f}"
        + (f" at one anchor per {known.tokens_per_anchor:g} tokens" if known.tokens_per_anchor else ""),
        style="bold",
    )
    if rates.power is not None:
        power = rates.power
        console.print(
            f"watts: a target {power.target:,.0f}, a drafter {power.drafter:,.0f}, a GPU that waits {power.waiting:,.0f}"
            f"{f', the rest of the host {power.host:,.0f}' if power.host else ''}"
        )


def make_table(drafters: int, points: list[Point], known: Known, rates: Rates, best: Point | None, measured: dict[int, float]) -> Table:
    title = f"{drafters} drafter" + ("s (arithmetic only: a run has one)" if drafters > 1 else "")
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, collapse_padding=True)
    columns = ["topology", "tokens/s", "waits"] + (["measured"] if measured and drafters == 1 else [])
    columns += ["kW", "tokens/J"] if rates.power is not None else []
    columns += ["days", "GPU-hours"] if known.tokens else []
    columns += ["balanced at\n1 anchor in"] if rates.cost is not None else []
    for name in columns:
        table.add_column(name, justify="left" if name in ("topology", "waits") else "right", no_wrap=True)
    for one in points:
        cells = [f"{one.targets}-{drafters}", f"{one.tokens_per_second:,.0f}", one.waits]
        if measured and drafters == 1:
            cells.append(f"{measured[one.targets]:,.0f}" if one.targets in measured else "")
        if one.watts is not None:
            cells += [f"{one.watts / 1000:.2f}", f"{one.tokens_per_joule:.2f}"]
        if one.days is not None:
            cells += [_figure(one.days), _figure(one.gpu_hours)]
        if rates.cost is not None:
            anchors = balance(rates, one.targets, drafters)
            cells.append("none" if anchors is None else f"{anchors:.1f}")
        table.add_row(*cells, style="bold green" if one == best else "")
    return table


def balance(rates: Rates, targets: int, drafters: int) -> float | None:
    """Tokens per anchor at which neither side waits; None where the cost is not known, or no number of anchors would do."""
    return rates.cost.balancing_tokens_per_anchor(targets * rates.target / drafters) if rates.cost is not None else None


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def say_result(
    console: Console, known: Known, rates: Rates, best: Point | None, args: argparse.Namespace, measured: dict[int, float]
) -> None:
    if best is None:
        raise ValueError(f"--gpus {args.gpus}: a target and a drafter need 2")
    within = f" of at most {args.gpus} GPUs" if args.gpus else ""
    time = "" if best.days is None else f", {_figure(best.days)} days, {_figure(best.gpu_hours)} GPU-hours"
    console.print(
        f"recommended{within}: {best.targets}-{best.drafters}: {best.tokens_per_second:,.0f} tokens/s, waits: {best.waits}{time}",
        style="bold green",
    )
    more = point(rates, best.targets + 1, best.drafters, known.tokens)
    if more.tokens_per_second <= best.tokens_per_second * 1.01:
        console.print(
            f"{more.targets} targets are no faster than {best.targets}: {best.targets} x {rates.target:,.0f} = "
            f"{best.targets * rates.target:,.0f} tokens/s already fill {best.drafters} x {rates.drafter:,.0f} of the drafter"
        )
    wanted = args.balance or best.targets
    anchors = balance(rates, wanted, best.drafters)
    if rates.cost is None:
        console.print("balancing anchors: how the drafter's time splits is not known; add --config or a drafter's --bench record")
    elif anchors is None:
        console.print(f"{wanted} targets make more tokens than a drafter could take without any anchor")
    else:
        console.print(
            f"{wanted} targets balance {best.drafters} drafter{'s' if best.drafters > 1 else ''} at one anchor per {anchors:.1f} tokens "
            f"(anchors.tokens_per_anchor), {1 / anchors:.4f} anchors per token"
        )
    for targets, rate in sorted(measured.items()):
        planned = point(rates, targets, 1).tokens_per_second
        if abs(rate / planned - 1) > 0.02:
            console.print(
                f"{targets}-1 was measured at {rate:,.0f} tokens/s, {abs(rate / planned - 1):.0%} "
                f"{'under' if rate < planned else 'over'} the {planned:,.0f} of this arithmetic, which does not explain it"
            )


def as_json(known: Known, rates: Rates, tables: dict[int, list[Point]], best: Point | None, measured: dict[int, float]) -> dict[str, Any]:
    rows = [
        {**one.as_dict(), "waits": one.waits, "balancing_tokens_per_anchor": balance(rates, one.targets, one.drafters)}
        for points in tables.values()
        for one in points
    ]
    return {
        "sources": list(known.said),
        "target_tokens_per_second": rates.target,
        "drafter_tokens_per_second": rates.drafter,
        "drafter_cost": vars(rates.cost) if rates.cost else None,
        "power": vars(rates.power) if rates.power else None,
        "tokens": known.tokens,
        "tokens_per_anchor": known.tokens_per_anchor,
        "measured": {f"{targets}-1": rate for targets, rate in measured.items()},
        "recommended": {"targets": best.targets, "drafters": best.drafters} if best else None,
        "topologies": rows,
    }


def _parser() -> cli.Arguments:
    parser = cli.Arguments(prog="python -m jobs.plan_topology", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
