"""Longer conversations out of answered prompts: a sheet asks two to four things at once, and its answer is theirs, numbered.

Nothing in a sheet is new text: every part's answer is the one that the teacher gave, and passed the same checks. They exist because
single answers are short (20 tokens) and a drafter needs runs of several blocks to learn from.
"""

import random
from collections.abc import Sequence

from jobs.quickstart.prompts.prompt import Prompt

OPENINGS = (
    "Answer these questions.",
    "Please answer each of these.",
    "Do these exercises.",
    "Help me with a few things.",
    "Work through this list.",
    "Answer one after the other.",
)


def sheet(name: str, parts: Sequence[Prompt], opening: str) -> Prompt:
    asked = "\n".join(f"{i}. {p.text}" for i, p in enumerate(parts, start=1))
    return Prompt(id=name, kind="sheet", text=f"{opening}\n{asked}", shots=(), parts=tuple(parts))


def make(answered: Sequence[tuple[Prompt, str]], count: int, seed: int, name: str = "sheet") -> list[tuple[Prompt, str]]:
    """At most `count` distinct sheets of the given answers, half of them about things of one kind; none if there are under four kinds.

    Answers of several lines take no part.
    """
    usable = [pair for pair in answered if "\n" not in pair[1]]
    by_kind: dict[str, list[tuple[Prompt, str]]] = {}
    for pair in usable:
        by_kind.setdefault(pair[0].kind, []).append(pair)
    kinds = sorted(k for k, group in by_kind.items() if len(group) >= 4)
    rng = random.Random(f"{seed}-sheets")
    made: dict[str, tuple[Prompt, str]] = {}
    if len(kinds) < 4:
        return []
    for _ in range(20 * count):
        if len(made) == count:
            break
        size = rng.randint(2, 4)
        if rng.random() < 0.5:
            chosen = rng.sample(by_kind[rng.choice(kinds)], size)
        else:  # kinds, then answers: otherwise sums would fill the sheets
            chosen = [rng.choice(by_kind[k]) for k in rng.sample(kinds, size)]
        prompt = sheet(f"{name}-{len(made):05d}", [p for p, _ in chosen], rng.choice(OPENINGS))
        made[prompt.text] = prompt, "\n".join(f"{i}. {text}" for i, (_, text) in enumerate(chosen, start=1))
    return list(made.values())
