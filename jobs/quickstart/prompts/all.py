"""The project's own prompts: templates of many kinds filled with many values.

`make(seed, limit)` is a pure function of its arguments and the words: distinct prompts, shuffled, each with what the teacher is shown
before it (worked examples: a 135M model answers far shorter and better after two of them than after an instruction) and with what a
good answer must contain where the template knows it (the result of a sum, a capital, the past tense), so that wrong answers can be dropped.
"""

import random

from jobs.quickstart.prompts import language as prompts_language
from jobs.quickstart.prompts import numbers as prompts_numbers
from jobs.quickstart.prompts import texts as prompts_texts
from jobs.quickstart.prompts import things as prompts_things
from jobs.quickstart.prompts.prompt import Prompt

# their order is part of what `make` returns
KINDS = {name: kind for part in (prompts_numbers, prompts_things, prompts_texts, prompts_language) for name, kind in part.kind.all.items()}


def make(seed: int, limit: int | None = None) -> list[Prompt]:
    """Distinct prompts of all kinds in an order that depends on the seed alone; `limit` keeps the first so many."""
    made: dict[str, Prompt] = {}
    for name, (most, generate, shots) in KINDS.items():
        rng = random.Random(f"{seed}-{name}")
        fields = list({f["text"]: f for f in generate(rng) if f["text"] not in made}.values())
        rng.shuffle(fields)
        for i, f in enumerate(fields[:most]):
            made[f["text"]] = Prompt(id=f"{name}-{i:05d}", kind=name, shots=shots, **f)
    prompts = list(made.values())
    random.Random(seed).shuffle(prompts)
    return prompts[:limit]
