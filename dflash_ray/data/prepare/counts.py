"""What became of the rows: counts that always add up, and a few places to look at for every reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_ray.data.prepare.render import Rendered
from dflash_ray.data.prepare.rows import Refused

_EXAMPLES = 3  # places named per reason
_REASONS = 64  # reasons told apart; a template that puts data into its message could make any number
_EDGES = [2**power for power in range(5, 32)]


@dataclass
class Counts:
    """lines_read = kept + sum of skipped, at any time."""

    lines_read: int = 0
    kept: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)  # reason -> "file:line: detail" of the first few
    samples: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    turns: int = 0
    turns_skipped: dict[str, int] = field(default_factory=dict)  # of kept lines
    clipped: int = 0
    turns_with_ids: int = 0
    turns_encoded_differently: int = 0
    answers_spelling_special_tokens: int = 0
    length_histogram: dict[str, int] = field(default_factory=dict)  # samples of at most so many tokens and more than the one before
    added_tokens: dict[str, int] = field(default_factory=dict)  # id -> how often, of added tokens that occur

    def add(self, other: Counts) -> None:
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(value, int):
                setattr(self, name, mine + value)
            elif name == "examples":
                for reason, places in value.items():
                    mine[reason] = [*mine.get(reason, []), *places][:_EXAMPLES]
            else:
                for key, number in value.items():
                    _count(mine, key, number)

    def skip(self, refusal: Refused, place: str) -> None:
        reason = _count(self.skipped, refusal.reason)
        places = self.examples.setdefault(reason, [])
        if len(places) < _EXAMPLES:
            places.append(f"{place}: {refusal.detail}" if refusal.detail else place)

    def keep(self, rendered: Rendered) -> None:
        """Counts a row of which samples are kept."""
        self.kept += 1
        self.turns += rendered.turns
        self.clipped += rendered.clipped
        self.turns_with_ids += rendered.with_ids
        self.turns_encoded_differently += rendered.ids_differ
        self.answers_spelling_special_tokens += rendered.spelled_specials
        for refusal in rendered.refused_turns:
            _count(self.turns_skipped, refusal.reason)

    def measure(self, ids: np.ndarray, mask: np.ndarray, lengths: np.ndarray, added: np.ndarray) -> None:
        """Counts what the kept rows hold: their samples end to end, the lengths of those, and the ids of added tokens to look for."""
        self.samples, self.tokens, self.supervised_tokens = len(lengths), len(ids), int(mask.sum())
        for edge, number in zip(*np.unique(np.searchsorted(_EDGES, lengths), return_counts=True), strict=True):
            self.length_histogram[str(_EDGES[edge])] = int(number)
        found, numbers = np.unique(ids[np.isin(ids, added)], return_counts=True)
        self.added_tokens = {str(index): int(number) for index, number in zip(found, numbers, strict=True)}

    def as_dict(self) -> dict[str, Any]:
        """JSON values; `Counts(**counts.as_dict())` is equal."""
        histogram = {edge: self.length_histogram[edge] for edge in sorted(self.length_histogram, key=int)}
        return {**vars(self), "length_histogram": histogram}


def _count(table: dict[str, int], key: str, number: int = 1) -> str:
    """Adds to `table` and returns the key that was used; new keys past a bound are counted together."""
    if key not in table and len(table) >= _REASONS and not key.isdigit():
        key = "other"
    table[key] = table.get(key, 0) + number
    return key
