"""What the coordinator knows of one target over its restarts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dflash_ray.pipeline.restarts import RestartBudget
from dflash_ray.transport.peer import Buffer


@dataclass
class Target:
    name: str
    handle: Any = None
    state: str = "starting"  # starting | working | leaving | waiting (to restart) | gone
    budget: RestartBudget = field(default_factory=lambda: RestartBudget(0))
    buffers: list[Buffer] = field(default_factory=list)  # of its GPU that the drafter has mapped
    batches: int = 0
    tokens: int = 0
    seconds: float = 0.0  # busy
    idle_since: float | None = None
    checking: int = 0  # tokens of cross-checks that stand before its next batch
    fresh: bool = True  # its process has computed nothing yet
