"""What jobs.quality shows at its end: every run, then every recipe."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from dflash_ray.planning.quality import TOLERANCE, summarise


def show(runs: list[dict[str, Any]], console: Console) -> None:
    """Every run, then every recipe with mean and least-most over its seeds."""
    columns = "recipe, seed, steps, train s, all s, Mtok, loss, val tau, replay, tau, slots 1 2 ..., tok/s, plain, lossless".split(", ")
    table = Table(*columns, box=None, pad_edge=False)
    for run_ in runs:
        table.add_row(
            run_["recipe"],
            str(run_["seed"]),
            str(run_["steps"]),
            f"{run_['training_seconds']:.1f}{'*' if run_['off_budget'] else ''}",
            f"{run_['total_seconds']:.0f}",
            f"{run_['tokens'] / 1e6:.2f}",
            f"{run_['loss']:.3f}",
            _number(run_["validation_tau"]),
            _number(run_["replay_tau"]),
            _number(run_["tau"]),
            _slots(run_["per_slot_acceptance"]),
            f"{run_['tokens_per_second']:.0f}",
            f"{run_['plain_tokens_per_second']:.0f}",
            f"{'yes' if run_['lossless'] else 'NO'}, {run_['divergences']} differ",
        )
    wide = Console(width=max(console.width, 160), highlight=False, markup=False)
    wide.print(table)
    if any(run_["off_budget"] for run_ in runs):
        wide.print(f"* more than {100 * TOLERANCE:.0f}% off the wanted time; epochs are whole")
    table = Table("recipe", "seeds", "train s", "val tau", "replay", "tau", "slots 1 2 ...", "tok/s", "plain", box=None, pad_edge=False)
    for row in summarise(runs):
        table.add_row(
            row["recipe"],
            str(row["seeds"]),
            _spread(row["training_seconds"], 1),
            _spread(row["validation_tau"], 2),
            _spread(row["replay_tau"], 2),
            _spread(row["tau"], 2),
            _slots(row["per_slot_acceptance"]),
            _spread(row["tokens_per_second"], 0),
            _spread(row["plain_tokens_per_second"], 0),
        )
    wide.print(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _slots(shares: list[float]) -> str:
    return " ".join(f"{share:.2f}".removeprefix("0") for share in shares[:7])


def _spread(value: dict[str, float] | None, digits: int) -> str:
    return "-" if value is None else f"{value['mean']:.{digits}f} ({value['min']:.{digits}f}-{value['max']:.{digits}f})"
