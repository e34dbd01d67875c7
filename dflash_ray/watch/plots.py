"""Pictures of a run, drawn from its files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402 - the backend must be chosen first

if TYPE_CHECKING:
    from dflash_ray.planning.balance import Point

BLUE, ORANGE, GREY = "#2f6fab", "#d9822b", "#8a8f98"


def plot_training(metrics: list[dict[str, Any]], validation: list[dict[str, Any]], served_tau: float | None, out: Path) -> None:
    """Loss and tau over optimizer steps; validation as points, served tau (measured at the end) as a line across."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    steps = [record["step"] for record in metrics]
    left.plot(steps, [record["loss"] for record in metrics], color=BLUE, alpha=0.3, linewidth=1)
    left.plot(steps, [record["loss_smooth"] for record in metrics], color=BLUE, linewidth=2, label="training, smoothed by tokens")
    right.plot(steps, [record["tau"] for record in metrics], color=ORANGE, alpha=0.45, linewidth=1, label="training")
    at = [record["step"] for record in validation]
    left.plot(at, [record["loss"] for record in validation], "o", color=GREY, label="held out")
    right.plot(at, [record["tau"] for record in validation], "o", color=GREY, label="held out")
    if served_tau is not None:
        right.axhline(served_tau, color="black", linestyle="--", linewidth=1, label=f"served, at the end: {served_tau:.2f}")
    for axes, title in ((left, "loss"), (right, "tau: tokens per target pass")):
        axes.set_title(title, loc="left")
        axes.set_xlabel("optimizer step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    figure.savefig(out, dpi=120)
    pyplot.close(figure)


def plot_topology(tables: dict[int, list[Point]], best: Point | None, measured: dict[int, float], out: Path) -> None:
    """Tokens/s over the number of targets, a line per number of drafters (`tables`), and the shares of time that each side waits."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for (drafters, points), color in zip(tables.items(), (BLUE, ORANGE, GREY) * len(tables), strict=False):
        rates = [one.tokens_per_second for one in points]
        left.plot([one.targets for one in points], rates, ".-", color=color, label=f"{drafters} drafter{'s' if drafters > 1 else ''}")
    if measured:
        left.plot(list(measured), list(measured.values()), "D", color="black", label="measured, 1 drafter")
    if best is not None:
        left.plot([best.targets], [best.tokens_per_second], "o", color="#2a8f5c", markersize=12, fillstyle="none", markeredgewidth=2)
        left.annotate(
            f" {best.targets}-{best.drafters}", (best.targets, best.tokens_per_second), xytext=(8, -14), textcoords="offset points"
        )
    points = next(iter(tables.values()))
    targets = [one.targets for one in points]
    right.plot(targets, [100 * one.target_wait for one in points], ".-", color=BLUE, label="each target")
    right.plot(targets, [100 * one.drafter_wait for one in points], ".-", color=ORANGE, label="the drafter")
    for axes, title in ((left, "real tokens per second"), (right, f"waiting, % of time, {points[0].drafters} drafter")):
        axes.set_title(title, loc="left")
        axes.set_xlabel("targets")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    figure.savefig(out, dpi=120)
    pyplot.close(figure)
