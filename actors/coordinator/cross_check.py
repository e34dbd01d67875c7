"""Every so many batches a second target must come to the same features; the one that does not is taken out of service.

Compared are sketches of a few kilobytes. Who is wrong, a third target says, also one that is still starting; where there are only two, both
are restarted, because weights read anew are the better witness. The features in question are trained on meanwhile: what is sampled finds a
bad device, not a bad batch.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import numpy as np
import ray

from actors.answers import ActorLost, answer, cause_of, first_line
from actors.coordinator.run_state import RunState, Target
from dflash_ray.pipeline.order import Item
from dflash_ray.transport.sketch import TOLERANCE, difference

CHECK_LIMIT = 1800.0


class Pool(Protocol):
    """What a check needs of the targets of a run."""

    run: RunState
    targets: dict[str, Target]

    def take_out(self, target: Target, reason: str) -> None: ...

    def restart(self, target: Target, reason: str) -> None: ...


class CrossCheck:
    def __init__(self, pool: Pool):
        self.pool, self.run_state = pool, pool.run
        spec = pool.run.spec
        self.every = spec.config.flow.cross_check_every
        precision = spec.config.target.precision
        self.tolerance = TOLERANCE[precision if precision != "auto" else "float32" if spec.device == "cpu" else "bf16"]
        self.done = 0

    def wants(self, item: Item) -> bool:
        return bool(self.every) and item.kind == "train" and item.number % self.every == 0

    async def run(self, target: Target, number: int, tokens: ray.ObjectRef, size: int, sketch: np.ndarray) -> None:
        """`sketch` is what `target` computed of batch `number`."""
        witness = await self._ask(tokens, size, without={target.name})
        if witness is None:
            return
        self.done += 1
        other, theirs = witness
        apart = difference(sketch, theirs)
        if apart <= self.tolerance:
            return
        what = f"features of batch {number} by {target.name} and {other.name} differ by {apart:.1e} (at most {self.tolerance:.0e})"
        self.run_state.event("targets_disagree", what, batch=number)
        handles = {target.name: target.handle, other.name: other.handle}
        await self.run_state.until(lambda: self._able(handles.keys()) or not self._coming(handles.keys()))
        third = await self._ask(tokens, size, without=set(handles))
        if third is None:
            self._each((target, other), handles, self.pool.restart, f"{what}, and no third target says who is right")
            return
        judge, judged = third
        wrong = [t for t, seen in ((target, sketch), (other, theirs)) if difference(seen, judged) > self.tolerance]
        if len(wrong) == 1:
            self._each(wrong, handles, self.pool.take_out, f"{what}; {judge.name} computes what the other one does")

    def _each(self, targets: Any, handles: dict[str, Any], deed: Any, reason: str) -> None:
        for target in targets:
            if target.state == "working" and target.handle is handles[target.name]:  # else it is another process by now
                deed(target, reason)

    def _able(self, without: Collection[str]) -> list[Target]:
        return [t for t in self.pool.targets.values() if t.state == "working" and t.name not in without]

    def _coming(self, without: Collection[str]) -> bool:
        return any(t.state in ("starting", "waiting") and t.name not in without for t in self.pool.targets.values())

    async def _ask(self, tokens: ray.ObjectRef, size: int, without: set[str]) -> tuple[Target, np.ndarray] | None:
        """The working target with the fewest checks before it, and its sketch; None if there is none or it did not answer."""
        able = self._able(without)
        if not able:
            return None
        witness = min(able, key=lambda target: target.checking)
        handle = witness.handle
        witness.checking += size
        try:
            return witness, await answer(handle.sketch.remote(tokens), witness.name, "a cross-check", CHECK_LIMIT)
        except (ActorLost, ray.exceptions.RayTaskError) as error:
            cause = cause_of(error) if isinstance(error, ray.exceptions.RayTaskError) else error
            self.run_state.event("cross_check_failed", f"{witness.name}: {first_line(cause)}", actor=witness.name)
            return None
        finally:
            if witness.handle is handle:
                witness.checking -= size
