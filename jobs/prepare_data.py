"""Conversations to a tokenised data set with a loss mask: `python -m jobs.prepare_data --input FILE ... --tokenizer DIR --output DIR`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.support.cli import Arguments, run
from jobs.support.paths import require_absolute, require_writable, write_file

if TYPE_CHECKING:
    from dflash_ray.data.prepare.prepare import PrepareSettings


def main(argv: list[str]) -> int:
    args = _arguments().parse_args(argv)

    from dflash_ray.data.prepare.prepare import prepare
    from dflash_ray.data.prepare.tokenizer import ChatTokenizer, check_same_tokenizer
    from jobs.support.tables.preparation import Progress, print_report, show_samples

    settings = _checked(args)
    tokenizer = ChatTokenizer(settings.tokenizer, settings.chat_template)
    if args.target:
        check_same_tokenizer(tokenizer.fingerprint(), args.target)
    spread = None
    if args.num_workers > 1:
        from jobs.support.prepare_tasks import spread_over_tasks

        spread = spread_over_tasks(settings, args.num_workers)
    with Progress() as progress:
        report = prepare(settings, tokenizer, spread, progress)
    if args.target and report["samples"]:
        from dflash_ray.generation.on_policy import check_target

        report["on_policy"] = check_target(args.target, settings.output, tokenizer)
    if args.json:
        write_file("--json", args.json, json.dumps(report, indent=1))
    print_report(report, settings)
    if not report["samples"]:
        raise ValueError(f"none of {report['lines_read']} rows can be trained on; no data set was written")
    show_samples(tokenizer, settings.output)
    return 0


def _arguments() -> Arguments:
    parser = Arguments(prog="python -m jobs.prepare_data", description=__doc__)
    parser.add_argument("--input", nargs="+", required=True, type=Path, action="extend", metavar="FILE|DIR")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="folder of the target's tokenizer (default: --target)")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR")
    parser.add_argument("--max-length", type=int, default=8192, help="tokens after which a sample is cut (default %(default)s)")
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="Jinja template instead of the tokenizer's own")
    parser.add_argument("--validation", type=float, default=0.01, help="share of samples held out, by conversation (default %(default)s)")
    parser.add_argument(
        "--columns", nargs="+", default=[], metavar="OURS=THEIRS", help="for instance input_ids=tokens loss_mask=labels_mask"
    )
    parser.add_argument("--num-workers", type=int, default=1, help="1: this process; more: Ray tasks (default %(default)s)")
    parser.add_argument(
        "--target", type=Path, metavar="DIR", help="also measure how much of the answers this target would have said itself"
    )
    parser.add_argument("--strict", action="store_true", help="stop at the first bad row with exit code 2")
    parser.add_argument("--json", type=Path, metavar="REPORT", help="write the report there too")
    return parser


def _checked(args: argparse.Namespace) -> PrepareSettings:
    from dflash_ray.data.prepare.prepare import PrepareSettings
    from dflash_ray.target.shape import read_target_shape

    for path in args.input:
        require_absolute(input=path)
    require_absolute(output=args.output, tokenizer=args.tokenizer, json=args.json, chat_template=args.chat_template, target=args.target)
    if args.tokenizer is None and args.target is None:
        raise ValueError("--tokenizer: give the folder of the target's tokenizer")
    if args.num_workers < 1:
        raise ValueError(f"--num-workers {args.num_workers}: at least 1 process prepares")
    if args.json:
        require_writable("--json", args.json)
    if args.target:
        read_target_shape(args.target)
    return PrepareSettings(
        inputs=tuple(args.input),
        tokenizer=args.tokenizer or args.target,
        output=args.output,
        max_length=args.max_length,
        chat_template=args.chat_template,
        validation=args.validation,
        strict=args.strict,
        columns=tuple(_pair(text) for text in args.columns),
    )


def _pair(text: str) -> tuple[str, str]:
    ours, equals, theirs = text.partition("=")
    if not (ours and equals and theirs):
        raise ValueError(f"--columns {text}: write OURS=THEIRS, for instance input_ids=tokens")
    return ours, theirs


if __name__ == "__main__":
    run(main)
