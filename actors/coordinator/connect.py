"""Which way a target's features travel, decided when it comes up by trying both."""

from __future__ import annotations

import time
from typing import Any

import ray

from actors.answers import ActorLost, RunFailed, answer, cause_of, first_line
from actors.coordinator.run_state import RunState
from dflash_ray.transport.peer import Buffer

PROBE_LIMIT = 120.0


async def connect(run: RunState, name: str, handle: Any, drafter: Any) -> list[Buffer]:
    """Tries the direct way from target `name` to the drafter against the object store and takes the faster one. Returns the target's
    buffers that the drafter may have mapped. RunFailed where `transport.kind: direct` was asked for and does not work."""
    kind = run.spec.config.transport.kind
    if kind == "object_store" or run.spec.device != "cuda":
        return []
    buffers: list[Buffer] = []
    try:
        probe, buffers = await answer(
            handle.offer.remote(run.spec.config.transport.slots, run.feature_slot_bytes), name, "an offer of buffers", PROBE_LIMIT
        )
        direct = await answer(drafter.probe.remote(probe), "drafter", f"a direct copy from {name}", PROBE_LIMIT)
        store = 0.0
        for _ in range(2):  # the first one allocates pinned memory on both sides
            began = time.perf_counter()
            await answer(drafter.time_store.remote(handle.store_probe.remote()), "drafter", f"a copy from {name}", PROBE_LIMIT)
            store = _nbytes(probe) / (time.perf_counter() - began)
    except ray.exceptions.RayTaskError as error:
        reason = first_line(cause_of(error))
    except ActorLost as error:
        reason = str(error)
    else:
        if direct > store or kind == "direct":
            await answer(handle.direct.remote(True), name, "the direct way", PROBE_LIMIT)
            run.event("transport", f"{name}: direct, {direct / 1e9:.1f} GB/s (object store {store / 1e9:.1f})", actor=name, way="direct")
            return buffers
        reason = f"direct copies at {direct / 1e9:.1f} GB/s are slower than {store / 1e9:.1f}"
    if kind == "direct":
        raise RunFailed(f"transport.kind direct: {name}: {reason}; with auto the run takes the object store instead")
    run.event("transport", f"{name}: object store, because {reason}", actor=name, way="object_store")
    handle.direct.remote(False)
    drafter.forget.remote(buffers)
    return []


def _nbytes(probe: Any) -> int:
    return probe.shape[0] * 4
