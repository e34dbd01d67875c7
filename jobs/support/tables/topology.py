"""What jobs.plan_topology shows: where its rates are from, a table for each number of drafters, and what it recommends."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from dflash_ray.planning.balance import Point, Rates, point
from dflash_ray.planning.stage_rates import Known

Measured = dict[int, float]  # targets -> tokens/s of a whole run with one drafter


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


def make_table(drafters: int, points: list[Point], known: Known, rates: Rates, best: Point | None, measured: Measured) -> Table:
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
    console: Console, known: Known, rates: Rates, best: Point, measured: Measured, gpus: int | None, balanced: int | None
) -> None:
    """`gpus`: the limit that was given; `balanced`: how many targets the anchors are to balance, by default the recommended ones."""
    within = f" of at most {gpus} GPUs" if gpus else ""
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
    wanted = balanced or best.targets
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


def as_json(known: Known, rates: Rates, tables: dict[int, list[Point]], best: Point, measured: Measured) -> dict[str, Any]:
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
        "recommended": {"targets": best.targets, "drafters": best.drafters},
        "topologies": rows,
    }
