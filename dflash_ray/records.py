"""Records: what stands in a file is a frozen dataclass, written and read in one place.

`as_json` gives the mapping that a file holds, with the record's version last. `from_json` reads one back: an older mapping first goes
through the named upgrades of its class, one per version; a missing, unknown or wrong key is then a ValueError that names it. Keys have
the names that users know, so a field is renamed by an upgrade and never in silence.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

MOST = 1e300  # sums and means of numbers below it are numbers
LATEST = 1e11  # seconds since 1970 that a calendar still knows

Check = tuple[str, Callable[[Any], bool]]  # what a value must be, and whether it is


def finite(value: Any) -> bool:
    """Whether it is a number to calculate with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST


def _number(value: Any) -> bool:
    """A loss may be NaN or infinite: a step that was skipped had one."""
    return finite(value) or (isinstance(value, float) and not math.isfinite(value))


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST


def list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(check(one) for one in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


NUMBER: Check = ("a number", _number)
FINITE: Check = ("a finite number", finite)
COUNT: Check = ("a count", _count)
TEXT: Check = ("a text", _is_text)
NUMBERS: Check = ("a list of numbers", list_of(_number))
COUNTS: Check = ("a list of counts", list_of(_count))
TEXTS: Check = ("a list of texts", list_of(_is_text))
MAPPING: Check = ("a mapping", lambda value: isinstance(value, dict))
TIME: Check = ("a time", lambda value: finite(value) and abs(value) < LATEST)


def or_null(check: Check) -> Check:
    what, holds = check
    return f"{what} or null", lambda value: value is None or holds(value)


def key(check: Check) -> Any:
    """A field that every record of the newest version has."""
    return dataclasses.field(metadata={"check": check})


def optional_key(check: Check) -> Any:
    """A field that stands in the file only where there is something to tell; None otherwise."""
    return dataclasses.field(default=None, metadata={"check": check, "optional": True})


def other_keys() -> Any:
    """A mapping of all keys that have no field of their own; they stand beside the others in the file."""
    return dataclasses.field(default_factory=dict, metadata={"others": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What each record has. Version 0 is a mapping without a version, as all were written before records had one."""

    VERSION: ClassVar[int] = 1
    UPGRADES: ClassVar[tuple[Callable[[dict[str, Any]], dict[str, Any]], ...]] = ()  # from version 0, 1, ... to the next one

    def values(self) -> dict[str, Any]:
        """The record's keys and values without its version; values are the record's own, not copies."""
        out: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.metadata.get("others"):
                out |= value
            elif value is not None or not field.metadata.get("optional"):
                out[field.name] = value
        return out

    def as_json(self) -> dict[str, Any]:
        """What stands in a file."""
        return {**self.values(), "version": self.VERSION}

    @classmethod
    def from_json(cls, mapping: Mapping[str, Any], where: str, *needed: str) -> Self:
        """The record in `mapping`; `where` says which one it is, for messages. A record of version 0 may lack keys, which are then None,
        but not those of `needed`. ValueError names the key that is missing, unknown or no such value."""
        values = dict(mapping)
        version = values.pop("version", 0)
        if type(version) is not int or not 0 <= version <= cls.VERSION:
            raise ValueError(f"version of {where} is {str(version)[:40]!r}; this dflash-ray reads versions up to {cls.VERSION}")
        for upgrade in cls.UPGRADES[version:]:
            values = upgrade(values)
        fields = {field.name: field for field in dataclasses.fields(cls)}
        others = next((name for name, field in fields.items() if field.metadata.get("others")), None)
        if others is not None:
            values[others] = {name: values.pop(name) for name in list(values) if name not in fields or name == others}
        for name in values.keys() - fields.keys():
            raise ValueError(f"{where} has the unknown key {str(name)[:60]!r}; another version of dflash-ray wrote it, or it was damaged")
        for name, field in fields.items():
            if name == others:
                continue
            what, holds = field.metadata["check"]
            untold = name not in values and (version == 0 or field.metadata.get("optional"))
            missing = name not in values
            value = values.setdefault(name, None)
            if not (untold and name not in needed) and (missing or not holds(value)):
                raise ValueError(f"{name} of {where} is not {what}; the file was damaged")
        return cls(**values)
