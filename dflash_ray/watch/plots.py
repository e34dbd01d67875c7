"""The picture of a run, drawn from its files."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from dflash_ray.run.metric_records import StepRecord, ValidationRecord

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402 - the backend must be chosen first

BLUE, ORANGE, GREY = "#2f6fab", "#d9822b", "#8a8f98"


def plot_training(metrics: list[StepRecord], validation: list[ValidationRecord], served_tau: float | None, out: Path) -> None:
    """Loss and tau over optimizer steps; validation as points, served tau (measured at the end) as a line across."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    steps = [record.step for record in metrics]
    left.plot(steps, [record.loss for record in metrics], color=BLUE, alpha=0.3, linewidth=1)
    left.plot(steps, [record.loss_smooth for record in metrics], color=BLUE, linewidth=2, label="training, smoothed by tokens")
    right.plot(steps, [record.tau for record in metrics], color=ORANGE, alpha=0.45, linewidth=1, label="training")
    at = [record.step for record in validation]
    left.plot(at, [record.loss for record in validation], "o", color=GREY, label="held out")
    right.plot(at, [record.tau for record in validation], "o", color=GREY, label="held out")
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
