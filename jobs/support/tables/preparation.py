"""How a preparation shows itself: a progress bar, the counts, and three samples with their supervised part marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import rich.progress
from rich.console import Console
from rich.text import Text

from dflash_ray.data.prepare.counts import Counts
from dflash_ray.data.prepare.prepare import PrepareSettings
from dflash_ray.data.prepare.tokenizer import ChatTokenizer
from dflash_ray.data.store.dataset import open_dataset

LOW_SHARE = 0.5  # of supervised tokens that are the target's own choice
_SHOWN_CHARACTERS = 400


class Progress:
    """`with Progress() as progress: progress(bytes done, bytes in all, counts)`."""

    def __init__(self):
        self._bar = rich.progress.Progress(
            "preparing",
            rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            "{task.fields[state]}",
            rich.progress.TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("", state="")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._bar.live.is_started:  # stopping one that never started prints an empty line
            self._bar.stop()

    def __call__(self, done: int, total: int, counts: Counts) -> None:
        self._bar.start()
        state = f"{counts.lines_read:,} read, {counts.kept:,} kept, {counts.tokens:,} tokens"
        self._bar.update(self._task, completed=done, total=max(total, 1), state=state)


def print_report(report: dict[str, Any], settings: PrepareSettings) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if report.get("already_prepared"):
        console.print(f"{settings.output} was made from exactly this before; nothing to do")
    console.print(f"{report['lines_read']:,} rows read, {report['kept']:,} kept, {sum(report['skipped'].values()):,} skipped")
    for reason, number in sorted(report["skipped"].items(), key=lambda item: -item[1]):
        console.print(f"  {number:,} x {reason}")
        for place in report["examples"].get(reason, []):
            console.print(f"      {place}")
    if report["turns_skipped"]:
        console.print(
            "turns left out of kept rows: " + ", ".join(f"{number:,} x {reason}" for reason, number in report["turns_skipped"].items())
        )
    console.print(
        f"{report['samples']:,} samples, {report['tokens']:,} tokens, "
        f"{report['supervised_tokens']:,} supervised in {report['turns']:,} turns, "
        f"{report['clipped']:,} clipped at {settings.max_length:,} tokens"
    )
    if report["turns_with_ids"]:
        differ = report["turns_encoded_differently"]
        console.print(f"{report['turns_with_ids']:,} turns came with the target's own ids; the text of {differ:,} encodes differently")
    if report["answers_spelling_special_tokens"]:
        console.print(
            f"warning: {report['answers_spelling_special_tokens']:,} answers spell a special token; it was encoded as ordinary text. "
            "If they are raw completions, remove the special tokens from their text"
        )
    console.print("samples by length: " + ", ".join(f"<= {edge}: {number:,}" for edge, number in report["length_histogram"].items()))
    if report["samples"]:
        splits = ", ".join(f"{name} {split['samples']:,} samples" for name, split in report["splits"].items())
        console.print(f"{splits} in {settings.output}")
    if "on_policy" in report:
        _print_on_policy(console, report["on_policy"])
    if report["tokens_per_second"]:
        peak = report["peak_memory_bytes"] / 2**20
        console.print(f"{report['seconds']:.1f} s, {report['tokens_per_second']:,} tokens/s, at most {peak:,.0f} MiB of memory")


def _print_on_policy(console: Console, measured: dict[str, Any]) -> None:
    for name in ("with_thinking", "without_thinking"):
        part = measured[name]
        if part["tokens"]:
            console.print(
                f"{name.replace('_', ' ')}: {part['share']:.2f} of {part['tokens']:,} supervised tokens in {part['samples']} samples are "
                "the target's own choice"
            )
            if part["share"] < LOW_SHARE:
                console.print(
                    f"warning: under {LOW_SHARE}: the answers are by another author; a drafter learns best from the target's own answers, "
                    "make them with jobs.generate"
                )


def show_samples(tokenizer: ChatTokenizer, path: Path, number: int = 3) -> None:
    """The first, middle and last training sample; what is supervised is green, and in brackets where there is no colour."""
    console = Console(highlight=False, soft_wrap=True)
    data = open_dataset(path)
    for row in sorted(set(np.linspace(0, len(data) - 1, number).astype(int).tolist())):
        sample = data.read([row])[0]
        console.print(f"--- sample {row}: {len(sample.input_ids):,} tokens, {int(sample.loss_mask.sum()):,} supervised", markup=False)
        text = Text()
        for supervised, ids in _spans(sample.input_ids, sample.loss_mask):
            words = _shortened(tokenizer.decode(ids))
            text.append(words if console.is_terminal or not supervised else f"[[{words}]]", style="bold green" if supervised else "dim")
        console.print(text)


def _spans(ids: np.ndarray, mask: np.ndarray) -> list[tuple[bool, np.ndarray]]:
    cuts = np.flatnonzero(np.diff(mask)) + 1
    return [(bool(part[0]), piece) for part, piece in zip(np.split(mask, cuts), np.split(ids, cuts), strict=True)]


def _shortened(text: str) -> str:
    half = _SHOWN_CHARACTERS // 2
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:half]} ... {text[-half:]}"
