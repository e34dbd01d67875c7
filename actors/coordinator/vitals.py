"""How every actor is, asked about once a second: memory, device, power, and how long ago it last answered.

Nobody waits for an answer: an actor has at most one question open, and one that is busy or hangs only keeps its old vitals. Power and
Ray's metrics follow from the same round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ray

from actors.answers import ActorLost, answer
from actors.coordinator.power import PowerWatch
from actors.coordinator.run_state import RunState
from actors.ray_metrics import RayMetrics
from dflash_ray.machine.processes import Vitals, vitals

ANSWER_LIMIT = 30.0  # then the question is asked again


class VitalsWatch:
    """`questions()` gives actor name -> (handle, the method that tells its vitals) of every actor that is up."""

    def __init__(self, run: RunState, power: PowerWatch, metrics: RayMetrics, questions: Callable[[], dict[str, tuple[Any, Any]]]):
        self.run, self.power, self.metrics, self.questions = run, power, metrics, questions
        self._vitals: dict[str, Vitals] = {}
        self._heard: dict[str, float] = {}
        self._open: dict[str, tuple[Any, asyncio.Task]] = {}

    async def watch(self, status: Callable[[], dict[str, Any]]) -> None:
        """Never returns. `status` gives what the metrics are made of."""
        while True:
            questions = self.questions()
            for name in self._open.keys() - questions.keys():
                self._forget(name)
            for name, (handle, method) in questions.items():
                if name in self._open and self._open[name][0] is not handle:
                    self._forget(name)
                if name not in self._open or self._open[name][1].done():
                    self._open[name] = (handle, asyncio.ensure_future(self._ask(name, method)))
            await self.power.read(self._vitals)
            self.metrics.update(status())
            await asyncio.sleep(self.run.spec.config.power.every_seconds)

    async def _ask(self, name: str, method: Any) -> None:
        try:
            told = await answer(method.remote(), name, "its vitals", ANSWER_LIMIT)
        except (ActorLost, ray.exceptions.RayTaskError):
            return  # whoever depends on the actor notices its end, and says so
        self._vitals[name], self._heard[name] = told, self.run.now()

    def _forget(self, name: str) -> None:
        self._open.pop(name)[1].cancel()
        self._vitals.pop(name, None)
        self._heard.pop(name, None)

    def of(self, name: str) -> dict[str, Any]:
        """Vitals of one actor, its watts, and `silent_seconds` since it last answered."""
        if name == "coordinator":
            return {**vitals().as_dict(), "watts": None, "silent_seconds": 0.0}
        silent = self.run.now() - self._heard[name] if name in self._heard else None
        told = self._vitals[name].as_dict() if name in self._vitals else {}
        return {**told, "watts": self.power.watts.get(name), "silent_seconds": silent}

    def close(self) -> None:
        for name in list(self._open):
            self._forget(name)
