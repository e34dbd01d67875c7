"""What a check found, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "n/a", "warning", "blocker"]


@dataclass(frozen=True)
class Finding:
    """`level`: ok; n/a, the check has no object here; warning, the run works but not as well; blocker, it would fail. `do` says what to do
    about a warning or a blocker."""

    check: str
    level: Level
    what: str
    do: str = ""

    def __post_init__(self) -> None:
        assert bool(self.do) == (self.level in ("warning", "blocker")), self

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def blockers(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level == "blocker"]
