"""The batch order: training and validation batches in the one order in which the drafter consumes them.

What stands at position p is a pure function of four integers, so a restart, a rewind or another topology walks the same order. After every
`validate_every` optimizer steps, and after the last one, the validation batches stand in the order once more; they go through the same
queues and bounds as training batches and change nothing in them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    kind: str  # train | validation
    number: int  # batch number: 0, 1, 2, ..., training and validation batches counted apart
    step: int  # train: the step this batch belongs to; validation: the step that has just ended


@dataclass(frozen=True)
class BatchOrder:
    batches: int  # training batches in the whole run
    batches_per_step: int
    validate_every: int  # steps
    validation_batches: int

    @property
    def steps(self) -> int:
        return -(-self.batches // self.batches_per_step)

    @property
    def total(self) -> int:
        return self.batches + self._passes(self.steps) * self.validation_batches

    def _passes(self, steps: int) -> int:
        """Validation passes that lie before the first batch of step `steps` (0-based), that is after `steps` whole steps."""
        passes = steps // self.validate_every
        if steps == self.steps and steps > 0 and steps % self.validate_every:
            passes += 1
        return passes

    def position(self, number: int) -> int:
        """Where training batch `number` stands. `number == batches` gives the end of the order."""
        step = self.steps if number >= self.batches else number // self.batches_per_step
        return min(number, self.batches) + self._passes(step) * self.validation_batches

    def item(self, position: int) -> Item:
        if not 0 <= position < self.total:
            raise IndexError(f"position {position} of an order of {self.total}")
        if not self.validation_batches:
            return Item("train", position, position // self.batches_per_step)
        period_batches = self.validate_every * self.batches_per_step
        period = period_batches + self.validation_batches
        passes, rest = divmod(position, period)
        first = passes * period_batches
        here = min(period_batches, self.batches - first)  # the last period may be shorter
        if rest < here:
            number = first + rest
            return Item("train", number, number // self.batches_per_step)
        return Item("validation", rest - here, min((passes + 1) * self.validate_every, self.steps))

    def ends_step(self, number: int) -> bool:
        """Training batch `number` is the last one of its step."""
        return (number + 1) % self.batches_per_step == 0 or number + 1 == self.batches
