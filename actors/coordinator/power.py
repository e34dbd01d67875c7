"""The run's power: added up from what the actors or a file tell, and kept under a budget by parking targets."""

from __future__ import annotations

import asyncio
from typing import Any

from actors.coordinator.run_state import RunState
from actors.coordinator.targets import TargetPool
from dflash_ray.machine.processes import Vitals
from dflash_ray.watch.power import PowerCap, read_watts

UNREADABLE = 10  # readings in a row without watts before it is told


class PowerWatch:
    def __init__(self, run: RunState, pool: TargetPool):
        self.run, self.pool = run, pool
        config = run.spec.config.power
        self.config = config
        self.cap = PowerCap(config.budget_watts, config.wake_below) if config.budget_watts is not None else None
        self.watts: dict[str, float] = {}  # actor name -> watts of its device, as far as known
        self.total: float | None = None
        self._missing = 0
        self._told_missing = self._told_unreachable = False

    async def read(self, vitals: dict[str, Vitals]) -> None:
        """One reading. `vitals`: by actor name."""
        if self.config.source == "none":
            return
        why = "no actor's device tells its watts (power.source nvml)"
        devices: dict[Any, float] = {}
        if self.config.file is not None:
            try:
                devices = await asyncio.to_thread(read_watts, self.config.file)
            except (OSError, ValueError) as error:
                why = str(error)
            self.watts = {n: devices[k] for n, told in vitals.items() for k in (n, str(told.gpu)) if k in devices}
        else:
            known = {name: told for name, told in vitals.items() if told.watts is not None}
            self.watts = {name: told.watts for name, told in known.items()}
            devices = {(told.node, told.device): told.watts for told in known.values()}  # two actors may share one
        if not devices:
            self._say_missing(why)
            return
        self._missing, self._told_missing = 0, False
        self.total = sum(devices.values())
        self.run.meter.power(self.run.now(), self.total)
        if self.cap is not None:
            self._keep_under(self.cap, self.total)

    def _say_missing(self, why: str) -> None:
        self._missing += 1
        wanted = self.config.file is not None or (self.cap is not None and self.run.step > 0)  # a GPU tells once its actor is up
        if wanted and self._missing >= UNREADABLE and not self._told_missing:
            self._told_missing = True
            self.run.event("power_unreadable", f"{why}; the last reading stands, targets stay as they are")

    def _keep_under(self, cap: PowerCap, watts: float) -> None:
        wish = cap.decide(watts)
        if wish is None:
            return
        mean, flow = cap.mean, self.run.flow
        name = self.pool.park() if wish == "park" else self.pool.wake()
        if name is not None:
            cap.changed(wish)
            at_work = len(flow.targets) - len(flow.parked())
            why = f"above the budget of {cap.budget:,.0f} W" if wish == "park" else f"below {cap.wake_below:g} x {cap.budget:,.0f} W"
            done = "parked" if wish == "park" else "woken"
            self.run.event(done, f"{name}: {mean:,.0f} W are {why}; {at_work} targets at work", actor=name, watts=mean, at_work=at_work)
        elif wish == "park" and not self._told_unreachable:
            self._told_unreachable = True
            self.run.event("power_over_budget", f"{mean:,.0f} W are above the budget of {cap.budget:,.0f} W with one target at work")
