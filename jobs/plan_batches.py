"""Compares the four batching strategies on a set of lengths and finds the best bucket edges.

python -m jobs.plan_batches --lengths FILE.npy|DATASET_DIR [--token-budget 65536] [--edges 0,770,...] [--plot OUT.png] ...
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_ray.config.loading import load_config
from dflash_ray.config.schema import AnchorConfig, BatchingConfig, Config
from jobs.support.cli import Arguments, run
from jobs.support.paths import require_writable, write_file

if TYPE_CHECKING:
    import numpy as np


def main(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    for flag in ("json", "plot", "write_config"):
        if path := getattr(args, flag):
            require_writable(f"--{flag.replace('_', '-')}", path)
    config = _config(args)

    import yaml
    from rich.console import Console

    from dflash_ray.data.anchors import anchor_count
    from dflash_ray.data.batches.report import batching_report
    from jobs.support.tables.batches import plot_histogram, print_report

    lengths, candidates = read_lengths(args.lengths)
    counts = anchor_count(lengths, candidates, config.anchors.tokens_per_anchor)
    report = batching_report(lengths, counts, config.batching, config.run.seed)
    print_report(report, Console())
    if args.json:
        write_file("--json", args.json, json.dumps(report, indent=1))
    if args.write_config:
        chosen = config.batching.model_copy(update={"edges": report["bucketed"]["edges"]})
        write_file("--write-config", args.write_config, yaml.safe_dump({"batching": chosen.model_dump(mode="json")}, sort_keys=False))
    if args.plot:
        plot_histogram(lengths, report["bucketed"]["edges"], args.plot)
    return 0


def read_lengths(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(int64 lengths [N], int64 anchor candidates [N]) of a .npy file or of a data set folder's training split.

    A .npy file says nothing about masks: every token is taken as supervised, so a document of n tokens has n - 1 candidates.
    """
    import numpy as np

    from dflash_ray.data.store.dataset import open_dataset

    if path.is_dir():
        dataset = open_dataset(path)
        return dataset.lengths, dataset.anchor_candidates
    try:
        lengths = np.load(path, allow_pickle=False, mmap_mode="r")
    except OSError as error:
        raise ValueError(f"--lengths {path}: cannot be read: {error.strerror}") from None
    except (ValueError, EOFError, SyntaxError):  # what numpy raises for a foreign, cut or pickled file
        raise ValueError(f"--lengths {path}: neither a .npy file of whole numbers nor a data set folder") from None
    if not isinstance(lengths, np.ndarray) or lengths.ndim != 1 or lengths.dtype.kind not in "iu" or lengths.size == 0:
        found = f"{lengths.dtype} {list(lengths.shape)}" if isinstance(lengths, np.ndarray) else "an archive"
        raise ValueError(f"--lengths {path}: holds {found}; save one row of whole numbers, one length per sample")
    if lengths.min() < 1 or lengths.max() > np.iinfo(np.int32).max:
        raise ValueError(
            f"--lengths {path}: lengths run from {lengths.min()} to {lengths.max()}; they must be 1 or more and fit in 31 bits"
        )
    lengths = lengths.astype(np.int64)
    return lengths, lengths - 1


def _config(args: argparse.Namespace) -> Config:
    batching = {
        "token_budget": args.token_budget,
        "max_rows": args.max_rows,
        "buckets": args.buckets,
        "edges": args.edges,
        "lookahead": args.lookahead,
        "grid": args.grid,
    }
    return load_config(
        overrides={"batching": batching, "run": {"seed": args.seed}, "anchors": {"tokens_per_anchor": args.tokens_per_anchor}}
    )


def _parser() -> Arguments:
    defaults = BatchingConfig()
    parser = Arguments(prog="python -m jobs.plan_batches", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, required=True, help=".npy file of lengths, or a data set folder")
    parser.add_argument("--token-budget", default=65536, help="most tokens of a batch, padding included (default %(default)s)")
    parser.add_argument("--max-rows", default=defaults.max_rows, help="most documents of a padded batch (default %(default)s)")
    parser.add_argument("--buckets", default=defaults.buckets, help="most buckets to search for (default %(default)s)")
    parser.add_argument("--edges", default="auto", help="edges to evaluate instead of searching, for instance 0,770,8192")
    parser.add_argument("--grid", default=defaults.grid, help="distance of candidate edges in tokens (default %(default)s)")
    parser.add_argument("--lookahead", default=defaults.lookahead, help="window of the packed strategy in documents (default %(default)s)")
    parser.add_argument("--tokens-per-anchor", default=AnchorConfig().tokens_per_anchor, help="(default %(default)s)")
    parser.add_argument("--seed", default=0, help="(default %(default)s)")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--plot", type=Path, help="draw the histogram with the edges here")
    parser.add_argument("--write-config", type=Path, help="write a config file with these settings and edges here, for jobs.train --config")
    return parser


if __name__ == "__main__":
    run(main)
