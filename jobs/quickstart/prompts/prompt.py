"""A prompt of the quickstart, and what generators of prompts share."""

import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Shots = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Prompt:
    id: str
    kind: str
    text: str
    shots: Shots
    must: tuple[str, ...] = ()  # each stands in a good answer, as a whole word
    exact: str | None = None  # the one good answer
    number: int | None = None  # the last number of a good answer
    items: int | None = None  # a good answer is a numbered list of so many lines
    call: str | None = None  # a good answer defines a function for which this expression ...
    result: str | None = None  # ... has this value
    parts: tuple["Prompt", ...] = ()  # of a sheet: what it asks, one after the other


DRAWS = 8000  # how often a kind with more combinations than anyone wants draws one


class Kinds:
    """Generators of prompts by name, in the order in which they are written: `@kind(most, *shots)`, and at most `most` of the distinct
    prompts of one are used."""

    def __init__(self):
        self.all: dict[str, tuple[int, Callable[[random.Random], Iterator[dict]], Shots]] = {}

    def __call__(self, most: int, *shots: tuple[str, str]):
        def register(function):
            self.all[function.__name__] = (most, function, shots)
            return function

        return register


def a(noun: str) -> str:
    """The noun with its article, where it has none of its own and can be counted."""
    if noun in ("scissors", "soap"):
        return noun
    return f"{'an' if noun[0] in 'aeiou' and not noun.startswith('uni') else 'a'} {noun}"


def plural(noun: str) -> str:
    irregular = {
        "mouse": "mice",
        "goose": "geese",
        "fox": "foxes",
        "wolf": "wolves",
        "knife": "knives",
        "shelf": "shelves",
        "loaf of bread": "loaves of bread",
    }

    if noun in irregular:
        return irregular[noun]
    if noun in ("deer", "salmon", "goldfish", "moose"):
        return noun
    head, of, rest = noun.partition(" of ")
    if of:
        return plural(head) + of + rest
    if re.search(r"(s|x|ch|sh)$", noun):
        return noun + "es"
    if re.search(r"[^aeiou]y$", noun):
        return noun[:-1] + "ies"
    if noun.endswith("man"):
        return noun[:-2] + "en"
    return noun + "s"


def cross(templates: list[str], **values) -> Iterator[dict]:
    """Every template with every combination of values."""
    for template, *chosen in itertools.product(templates, *values.values()):
        yield {"text": template.format(**dict(zip(values, chosen, strict=True)))}
