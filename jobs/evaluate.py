"""Serve a drafter and measure it: `python -m jobs.evaluate --drafter DIR --target DIR --prompts FILE.jsonl ... [--json OUT]`.

Every prompt is answered by plain decoding and by speculative decoding on the same engine; the table shows what the drafter gained."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from jobs.support.cli import Arguments, run
from jobs.support.paths import require_writable, write_file

THINKING = {"off": (False,), "on": (True,), "both": (False, True)}


def main(argv: list[str]) -> int:
    parser = Arguments(prog="python -m jobs.evaluate", description=__doc__)
    parser.add_argument("--drafter", required=True, type=Path, metavar="DIR", help="exported drafter")
    parser.add_argument("--target", required=True, type=Path, metavar="DIR", help="the target it was trained for")
    parser.add_argument("--prompts", required=True, nargs="+", type=Path, action="extend", metavar="FILE", help="conversations, a set each")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="default %(default)s")
    parser.add_argument("--limit", type=int, help="prompts per file")
    parser.add_argument("--thinking", choices=THINKING, default="off", help="the template's thinking switch; both: reported apart")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling")
    parser.add_argument("--batch-size", type=int, default=1, help="prompts decoded at once (default %(default)s)")
    parser.add_argument("--device", default="auto", help="auto (a GPU if there is one), cpu, cuda")
    parser.add_argument("--precision", choices=("auto", "float32", "bf16"), default="auto", help="auto: float32 on cpu, bf16 on cuda")
    parser.add_argument("--threads", type=int, help="CPU threads; one is fastest for targets of a few million parameters (default torch's)")
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="Jinja template instead of the tokenizer's own")
    parser.add_argument("--trace", type=Path, metavar="OUT.jsonl", help="what every pass proposed and what was accepted")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--card", action="store_true", help="put tau of every set into the table of the drafter's README.md")
    args = vars(parser.parse_args(argv))

    if args["trace"] is not None and args["trace"] == args["json"]:
        raise ValueError(f"--trace {args['trace']}: is what --json names; give each a file of its own")
    for flag in ("json", "trace"):
        if args[flag] is not None:
            require_writable(f"--{flag}", args[flag])

    card = args["drafter"] / "README.md" if args.pop("card") else None
    if card is not None:
        _card_with(card, {})
        require_writable("--card", card)
    threads = args.pop("threads")
    if threads is not None:
        if threads < 1:
            raise ValueError(f"--threads {threads}: use at least 1")
        import torch

        torch.set_num_threads(threads)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from dflash_ray.serve.evaluate import EvaluateSettings, evaluate

    out, args["thinking"] = args.pop("json"), THINKING[args["thinking"]]
    args["prompts"] = tuple(args["prompts"])
    bar = Progress("answering", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=None)

    def answered(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        result = evaluate(EvaluateSettings(**args), answered)
    finally:
        if bar.live.is_started:  # stopping one that never started prints an empty line
            bar.stop()
    show(result)
    if result["other_target"]:
        what = f"--drafter {args['drafter']}: was trained for other weights than those of --target {args['target']}"
        print(f"warning: {what}; its tau may be lower than with its own", file=sys.stderr)
    if out is not None:
        write_file("--json", out, json.dumps(result, indent=1))
    if card is not None:
        how = "greedily" if result["temperature"] == 0 else f"at temperature {result['temperature']:g}"
        details = f"served {how}, at most {result['max_new_tokens']} tokens, {result['precision']}"
        taus = {f"{name}, {row['prompts']} prompts {details}": row["tau"] for name, row in result["sets"].items() if row["tau"] is not None}
        write_file("--card", card, _card_with(card, taus).removesuffix("\n"))
    return 0


def _card_with(path: Path, taus: dict[str, float]) -> str:
    """The card at `path` with these in its table of tau. ValueError for one that cannot be read or has no section for it."""
    from dflash_ray.draft.dflash.card import with_tau

    try:
        return with_tau(path.read_text(encoding="utf-8"), taus)
    except FileNotFoundError:
        raise ValueError(f"--card {path}: no such file; jobs.export writes one") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"--card {path}: {getattr(error, 'strerror', None) or error}") from None


def show(result: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("prompts", "tau", "tokens/s", "plain", "speed-up", "tokens", "passes", "lossless", box=None, pad_edge=False)
    rows = {**result["sets"], "all": result} if len(result["sets"]) > 1 else result["sets"]
    for name, row in rows.items():
        lossless = "sampled" if row["lossless"] is None else f"{'yes' if row['lossless'] else 'NO'}, {row['divergences']} differ"
        table.add_row(
            f"{name} ({row['prompts']})",
            "-" if row["tau"] is None else f"{row['tau']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['plain_tokens_per_second']:.1f}",
            f"{row['speedup']:.2f}x",
            str(row["tokens"]),
            str(row["passes"]),
            lossless,
        )
        skipped = ", ".join(f"{count} {reason}" for reason, count in row.get("skipped", {}).items())
        if skipped:
            console.print(f"{name}: skipped {skipped}")
    console.print(table)
    slots = " ".join(f"{share:.2f}" for share in result["per_slot_acceptance"])
    where = f"{result['precision']} on {result['device']}, block {result['block_size']}"
    console.print(f"accepted up to slot 1, 2, ...: {slots}   ({where})", soft_wrap=True)


if __name__ == "__main__":
    run(main)
