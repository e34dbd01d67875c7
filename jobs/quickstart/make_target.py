"""Makes the quickstart's target and its conversations again, from nothing but SmolLM2's registry package.

    python -m jobs.quickstart.make_target --output DIR [--stage all|prompts|answers|train|own-answers] [--device cuda|cpu]

Each stage reads what the one before wrote into DIR and writes its own file, so a stage can run on another machine:
prompts -> prompts.jsonl, answers (a GPU's work) -> answers.jsonl, train (a GPU's work) -> target/ and training.json,
own-answers (a CPU's work, in float32) -> train.jsonl, heldout.jsonl and own-answers.json.
"""

import argparse
import json
import random
import time
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path

from jobs.quickstart import filters, sheets
from jobs.quickstart.prompts import all as prompts
from jobs.support.cli import Arguments, run

STAGES = ("prompts", "answers", "train", "own-answers")
RESERVED = 40  # one prompt of so many is kept from the target's training, to see how it does on new ones
HELD_OUT = 16  # one prompt of so many that the target was trained on is kept from the drafter's training conversations
TEACHER_TOKENS = 120  # longer answers of the teacher are unfinished, and dropped
MAX_NEW_TOKENS = 192  # of the target: four answers on one sheet
LEAST_SURE = 0.15  # share of each kind's answers, those in which the teacher was least sure of its words, that is dropped
SHEETS = 1.0  # sheets per conversation wanted (before the checks)
PER_KIND = 50  # of so many conversations at most one is of one single kind; the easy kinds would outnumber the rest


def write_lines(path: Path, rows) -> None:
    with path.open("w", encoding="utf-8") as f:
        for row in rows:
            f.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_lines(path: Path) -> list[dict]:
    if not path.is_file():
        raise ValueError(f"{path} is missing: run the stage before this one, or all of them with --stage all.")
    with path.open(encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def read_prompts(folder: Path) -> list[prompts.Prompt]:
    rows = read_lines(folder / "prompts.jsonl")
    return [prompts.Prompt(**{**r, "shots": prompts.KINDS[r["kind"]][2], "must": tuple(r["must"])}) for r in rows]


def make_prompts(args) -> None:
    made = prompts.make(args.seed, args.limit)
    write_lines(args.output / "prompts.jsonl", ({k: v for k, v in asdict(p).items() if k not in ("shots", "parts")} for p in made))
    print(f"{len(made):,} prompts of {len(Counter(p.kind for p in made))} kinds")


def make_answers(args) -> None:
    from jobs.quickstart import teacher

    made = read_prompts(args.output)
    tokenizer, model = teacher.load(teacher.gguf_file(args.smollm2), args.device)
    print(f"teacher on {args.device}", flush=True)
    started = time.monotonic()
    with (args.output / "answers.jsonl").open("w", encoding="utf-8") as f:
        answers = teacher.answer(tokenizer, model, [teacher.chat(p) for p in made], TEACHER_TOKENS, args.batch)
        for count, (i, text, sure) in enumerate(answers, start=1):
            f.write(json.dumps({"id": made[i].id, "answer": text, "sure": round(sure, 4)}, ensure_ascii=False) + "\n")
            if count % args.batch == 0:
                f.flush()
                print(f"{count:,} answers, {time.monotonic() - started:.0f} s", flush=True)


def kept_answers(args) -> tuple[list[tuple[prompts.Prompt, str]], dict]:
    """(prompt, answer) pairs worth learning from, and how many were dropped for which reason."""
    answers = {r["id"]: r for r in read_lines(args.output / "answers.jsonl")}
    dropped: Counter = Counter()
    by_kind = defaultdict(list)
    for p in read_prompts(args.output):
        if p.id not in answers:
            continue
        reason = filters.fault(p, answers[p.id]["answer"])
        if reason is None:
            by_kind[p.kind].append((answers[p.id]["sure"], p, answers[p.id]["answer"]))
        else:
            dropped[reason] += 1
    kept = []
    for group in by_kind.values():
        checked = group[0][1].exact or group[0][1].number is not None or group[0][1].call or group[0][1].must
        cut = 0 if checked else int(LEAST_SURE * len(group))
        dropped["least sure"] += cut
        kept += [(p, text) for _, p, text in sorted(group, key=lambda g: g[0])[cut:]]
    kept.sort(key=lambda pair: pair[0].id)
    random.Random(args.seed).shuffle(kept)
    return kept, dict(dropped.most_common())


def every(nth: int, made: list[prompts.Prompt]) -> set[str]:
    """The ids of every so many prompts of each kind, at least one of each."""
    seen: Counter = Counter()
    ids = set()
    for p in made:
        if seen[p.kind] % nth == 0:
            ids.add(p.id)
        seen[p.kind] += 1
    return ids


def split(args) -> tuple[list[tuple[prompts.Prompt, str]], list[tuple[prompts.Prompt, str]], dict]:
    """Answered prompts to train the target on, those kept from it, and why answers were dropped; both with their sheets."""
    kept, dropped = kept_answers(args)
    reserved = every(RESERVED, read_prompts(args.output))
    seen = [pair for pair in kept if pair[0].id not in reserved]
    unseen = [pair for pair in kept if pair[0].id in reserved]
    return (
        sheets.make(seen, args.sheets, args.seed) + seen,
        sheets.make(unseen, max(1, args.sheets // RESERVED), args.seed + 1) + unseen,
        dropped,
    )


def train_target(args) -> None:
    from jobs.quickstart import target, tokenizer

    seen, unseen, dropped = split(args)
    pairs, held_out = ([(p.text, text) for p, text in part] for part in (seen, unseen))
    print(f"{len(pairs):,} answers to train on, {len(held_out):,} kept from it; dropped {dropped}", flush=True)
    own = tokenizer.train((f"{p}\n{a}" for p, a in pairs), args.vocab)
    model, history = target.train(
        own,
        target.config(args.vocab, hidden=args.hidden, layers=args.layers, mlp=args.mlp),
        pairs,
        held_out,
        device=args.device,
        seed=args.seed,
        epochs=args.epochs,
        batch_tokens=args.batch_tokens,
        lr=args.lr,
        seconds=args.train_seconds,
        report=lambda line: print(line, flush=True),
    )
    record = {
        "trained_on": len(pairs),
        "kept_from_it": len(held_out),
        "kinds": dict(Counter(p.kind for p, _ in seen).most_common()),
        "dropped": dropped,
        "parameters": sum(p.numel() for p in model.parameters()),
        "history": history,
    }
    target.save(model, own, args.output / "target")
    (args.output / "training.json").write_text(json.dumps(record, indent=1) + "\n")


def make_conversations(args) -> None:
    from jobs.quickstart import conversations, target

    tokenizer, model = target.load(args.output / "target")
    singles = [pair for pair in split(args)[0] if not pair[0].parts]
    held_out = every(HELD_OUT, [p for p, _ in singles])
    report = {}
    for i, (name, count) in enumerate((("train", args.train_conversations), ("heldout", args.heldout_conversations))):
        # Sheets are put together again on either side, so no part of a held-out one was in a drafter's training.
        mine = [pair for pair in singles if (pair[0].id in held_out) == (name == "heldout")]
        by_kind: Counter = Counter()
        chosen = [p for p, _ in sheets.make(mine, int(SHEETS * count), args.seed + 2 + i, f"{name}-sheet")]
        for p, _ in mine:
            by_kind[p.kind] += 1
            if by_kind[p.kind] <= max(2, count // PER_KIND):
                chosen.append(p)
        random.Random(args.seed).shuffle(chosen)
        started = time.monotonic()
        rows, left_out = conversations.make(tokenizer, model, chosen, count, MAX_NEW_TOKENS)
        write_lines(args.output / f"{name}.jsonl", rows)
        tokens = sum(len(r["conversations"][1]["output_ids"]) for r in rows)
        report[name] = {
            "prompts": len(chosen),
            "conversations": len(rows),
            "answer_tokens": tokens,
            "left_out": dict(left_out.most_common()),
        }
        print(f"{name}: {report[name]}, {time.monotonic() - started:.0f} s", flush=True)
    (args.output / "own-answers.json").write_text(json.dumps(report, indent=1) + "\n")


def main(argv: list[str]) -> int:
    parser = Arguments(
        prog="python -m jobs.quickstart.make_target", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--stage", choices=[*STAGES, "all"], default="all")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="of the teacher and of training; own answers always run on the CPU"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="use so many prompts only")
    parser.add_argument("--smollm2", type=Path, metavar="FILE", help="the .gguf file, where the package is not installed")
    parser.add_argument("--batch", type=int, default=2048, help="prompts that the teacher answers at once")
    parser.add_argument("--sheets", type=int, default=10_000, help="prompts put together from answered ones")
    parser.add_argument("--vocab", type=int, default=3072)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--mlp", type=int, default=368)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--train-seconds", type=float, help="stop training after about so long, with the whole schedule")
    parser.add_argument("--train-conversations", type=int, default=3000)
    parser.add_argument("--heldout-conversations", type=int, default=200)
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    make = dict(zip(STAGES, (make_prompts, make_answers, train_target, make_conversations), strict=True))
    for stage in STAGES if args.stage == "all" else (args.stage,):
        make[stage](args)
    return 0


if __name__ == "__main__":
    run(main)
