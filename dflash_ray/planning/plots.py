"""The picture of a topology: tokens per second and waiting over the number of targets."""

from __future__ import annotations

from pathlib import Path

from dflash_ray.planning.balance import Point
from dflash_ray.watch.plots import BLUE, GREY, ORANGE, pyplot


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
