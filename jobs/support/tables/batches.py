"""What jobs.plan_batches shows: the four strategies, the buckets, and a picture of the lengths with their edges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table


def print_report(report: dict[str, Any], console: Console) -> None:
    console.print(
        f"{report['samples']:,} samples, {report['tokens']:,} tokens, mean {report['tokens'] / report['samples']:,.0f}, "
        f"longest {report['longest']:,}; {report['token_budget']:,} tokens a batch, padded ones at most {report['max_rows']} rows\n"
    )
    headings = ("batches", "rows\nmin/mean/max", "padding\nefficiency", "budget\nused", "target\ntime", "new\ncompany", "anchors\nmax/mean")
    table = _table("strategy", headings)
    for name, figures in report["strategies"].items():
        table.add_row(
            name,
            f"{figures['batches']:,}",
            f"{figures['rows_min']}/{figures['rows_mean']:.1f}/{figures['rows_max']}",
            f"{figures['padding_efficiency']:.2%}",
            f"{figures['fill']:.2%}",
            f"{figures['relative_target_time']:.3f}",
            f"{figures['composition_change']:.2%}",
            f"{figures['anchors_max'] / figures['anchors_mean']:.2f}" if figures["anchors_max"] else "-",
        )
    console.print(table)
    console.print(
        "target time: estimated from batching.speed, sorted = 1; new company: pairs in one batch that are apart in the next epoch\n"
    )

    optimizer, edges = report["optimizer"], report["bucketed"]["edges"]
    how = f"searched on a grid of {optimizer['grid']} in {optimizer['seconds']:.2f} s" if optimizer["searched"] else "as given"
    console.print(f"bucket edges {','.join(map(str, edges))}")
    console.print(f"{how}; expected padding efficiency {optimizer['expected_efficiency']:.2%}\n")
    headings = ("samples", "batches", "mean\nlength", "rows per\nbatch", "padding\nefficiency", "expected")
    table = _table("lengths", headings)
    for bucket in report["bucketed"]["buckets"]:
        table.add_row(
            f"{bucket['above'] + 1}-{bucket['up_to']}",
            f"{bucket['samples']:,}",
            f"{bucket['batches']:,}",
            f"{bucket['mean_length']:,.0f}",
            f"{bucket['rows_mean']:.1f}",
            f"{bucket['padding_efficiency']:.2%}",
            f"{bucket['expected_efficiency']:.2%}",
        )
    console.print(table)
    bias = report["strategies"]["packed"]["shuffle_bias"]
    console.print(
        f"\npacked: documents are {bias['mean_displacement']:,.0f} places from where a uniform shuffle puts them, at most "
        f"{bias['max_displacement']:,} (shortest tenth {bias['shortest_tenth']:+.0f}, longest tenth {bias['longest_tenth']:+.0f})"
    )


def _table(first: str, headings: tuple[str, ...]) -> Table:
    table = Table(first, box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def plot_histogram(lengths: np.ndarray, edges: list[int], path: Path) -> None:
    """Writes a picture of the histogram of lengths with the bucket edges."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4), dpi=120)
    axes.hist(lengths, bins=min(256, int(lengths.max())), color="#4c78a8")
    for edge in edges[1:]:
        axes.axvline(edge, color="#e45756", linewidth=1)
        axes.annotate(f"{edge}", (edge, 1), xycoords=("data", "axes fraction"), rotation=90, fontsize=8, ha="right", va="top")
    axes.set(xlabel="tokens", ylabel="samples", title=f"{len(lengths):,} samples and the edges of {len(edges) - 1} buckets")
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"--plot {path}: cannot be written: {error}") from None
    finally:
        pyplot.close(figure)
