"""The target's own answers: `python -m jobs.generate --prompts FILE ... --target DIR --output FILE`.

Every assistant turn of a conversation is answered anew, in order; a conversation that ends with a question gets an answer. Settings such as
`--generation.batch_size 64`, `--topology 4-1` (four targets) or `--target.precision bf16` may follow, as for jobs.train."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from jobs.support.cli import ConfigArguments, config_of, run
from jobs.support.paths import require_absolute

THINKING = {"off": (False,), "on": (True,), "both": (False, True)}


def main(argv: list[str]) -> int:
    parser = ConfigArguments(prog="python -m jobs.generate", description=__doc__)
    parser.add_argument("--prompts", required=True, nargs="+", type=Path, action="extend", metavar="FILE", help="conversations")
    parser.add_argument("--target", required=True, type=Path, metavar="DIR")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="conversations with the target's answers and their ids")
    parser.add_argument("--max-new-tokens", type=int, default=1024, help="per answer (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--thinking", choices=THINKING, default="off", help="the template's thinking switch; both: a row of each")
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="Jinja template instead of the tokenizer's own")
    parser.add_argument("--json", type=Path, metavar="REPORT", help="write the report there too")
    args, flags = parser.parse_known_args(argv)
    config = config_of(args, flags)
    for path in args.prompts:
        require_absolute(prompts=path)
    require_absolute(target=args.target, output=args.output, chat_template=args.chat_template, json=args.json)
    for flag, path in (("--output", args.output), ("--json", args.json)):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{flag} {path}: its folder does not exist; create it first")

    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

    from dflash_ray.data.prepare.rows import find_files
    from dflash_ray.data.prepare.tokenizer import ChatTokenizer
    from dflash_ray.generation.generate import CrewLost, GenerateSettings, Tally, generate
    from dflash_ray.target.shape import read_target_shape

    settings = GenerateSettings(
        prompts=tuple(args.prompts),
        target=args.target,
        output=args.output,
        thinking=THINKING[args.thinking],
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=config.run.seed,
        group=4 * config.generation.batch_size,
    )
    settings.check()
    target_shape = read_target_shape(args.target)
    find_files(list(args.prompts), "--prompts")
    tokenizer = ChatTokenizer(args.target, args.chat_template)
    tokenizer.require_template()
    tokenizer.check_thinking(settings.thinking)
    stops = tuple(sorted({*target_shape.eos_token_ids, tokenizer.token_id(tokenizer.end_of_turn)}))

    from jobs.support.generate_crew import start_crew

    bar = Progress(SpinnerColumn(), "{task.description}", TimeElapsedColumn(), console=Console(stderr=True), transient=True)
    task = bar.add_task("answering", total=None)

    def show(tally: Tally) -> None:
        bar.update(task, description=f"{tally.answered + tally.reused:,} answered, {tally.tokens:,} tokens")

    try:
        crew = start_crew(settings, config, stops)
        try:
            with bar:
                report = generate(settings, tokenizer, target_shape, stops, crew, show)
        finally:
            crew.close()
    except CrewLost as error:
        print(f"failed: {error}; what was answered is kept, the same command goes on from there", file=sys.stderr)
        return 1
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print_report(report, args.output)
    return 0 if report["written"] else 1


def print_report(report: dict, output: Path) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{report['rows_read']:,} rows read; {report['answered']:,} conversations answered, {report['reused']:,} answered before, "
        f"{report['failed']:,} failed"
    )
    for title, reasons in (("cannot be asked", "skipped"), ("failed calls", "failed_calls"), ("ended early", "ended_early")):
        for reason, number in report[reasons].items():
            console.print(f"  {title}: {number:,} x {reason}")
            if reason in report["examples"] and reasons == "skipped":
                console.print(f"      {report['examples'][reason]}")
    console.print(
        f"{report['turns']:,} turns, {report['tokens']:,} tokens in {report['seconds']:.1f} s ({report['tokens_per_second']:,} tokens/s)"
    )
    console.print(f"{report['written']:,} rows in {output}")


if __name__ == "__main__":
    run(main)
