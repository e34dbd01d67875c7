"""Rows of `jobs.bench coordinator`: the bookkeeping alone, and the real coordinator with fake actors."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray

from actors.coordinator.actor import CoordinatorActor
from actors.placement import actor_options
from dflash_ray.config.loading import validate
from dflash_ray.pipeline.flow import Flow
from dflash_ray.run.spec import RunSpec, resolve
from jobs.benchmarks.fake_actors import FAKES
from jobs.support.local_ray import connect
from jobs.support.run_driver import run_info

FLOW_TARGETS, FLOW_BATCHES = 256, 20_000
STEP = 8  # batches
LIMIT = 60.0


def measure(targets: int, batches: int, warm: int) -> dict[str, Any]:
    """The record of both rows, printed as they come; counting begins after `warm` batches."""
    rows = [measure_flow(FLOW_TARGETS, FLOW_BATCHES)]
    print(f"{rows[0]['name']:<28} {rows[0]['batches_per_second']:10,.0f} batches/s")
    rows.append(measure_coordinator(targets, batches, warm))
    last = rows[-1]
    print(
        f"{last['name']:<28} {last['batches_per_second']:10,.0f} batches/s {last['cpu_ms_per_batch']:8.2f} ms of CPU per batch "
        f"{last['slowest_status_ms']:8.0f} ms slowest status"
    )
    record = {"job": "coordinator", "date": datetime.now(UTC).isoformat(timespec="seconds"), "cpus": os.cpu_count()}
    return record | {"machine": platform.machine(), "load": os.getloadavg()[0], "rows": rows}


def measure_flow(targets: int, batches: int) -> dict[str, Any]:
    """The flow class alone; every target answers in the order it was asked."""
    flow = Flow(batches, window=2 * targets + 2, window_bytes=10**12, prefetch=2 * targets)
    for number in range(targets):
        flow.add_target(f"target-{number}")
    working: deque[tuple[str, int]] = deque()
    began = time.perf_counter()
    while not flow.finished:
        for position in flow.wanted():
            flow.ready(position, 1)
        working.extend(flow.assign())
        flow.computed(*working.popleft(), seconds=1.0)
        while (position := flow.to_stage()) is not None:
            flow.staged(position)
            flow.done(position, 0.001)
    seconds = time.perf_counter() - began
    return {"name": f"flow, {targets} targets", "batches": batches, "batches_per_second": batches / seconds}


def fake_run(targets: int, batches: int, folder: Path) -> RunSpec:
    """A run whose every number but the number of batches is beside the point."""
    tree = {
        "run": {"name": "bench", "dir": str(folder)},
        "topology": f"{targets}-1",
        "target": {"shape": "tiny-hybrid"},
        "draft": {"mask_token_id": 1},
        "data": {"samples": batches},
        "train": {"batches_per_step": STEP},
        "checkpoint": {"every_steps": 10**6},
    }
    return resolve(validate(tree), device="cpu", run_dir=folder, namespace=f"dflash-ray-bench-{os.getpid()}")


def measure_coordinator(targets: int, batches: int, warm: int) -> dict[str, Any]:
    """A whole run with fake actors; counting begins after `warm` batches, when all of them are up, and ends before the last ones."""
    connect()
    with tempfile.TemporaryDirectory() as folder:
        spec = fake_run(targets, batches, Path(folder) / "run")
        options = actor_options("coordinator", "coordinator", spec)
        coordinator = CoordinatorActor.options(**options).remote(spec, None, 10**9, run_info(spec), FAKES)
        running = coordinator.run.remote()
        first = last = None
        waits = []
        try:
            while not ray.wait([running], timeout=0.25)[0]:
                began = time.perf_counter()
                status = ray.get(coordinator.status.remote(), timeout=LIMIT)
                now = time.perf_counter()
                lines = {line["name"]: line for line in status["actors"]}
                up = sum(line["state"] == "working" for name, line in lines.items() if name.startswith("target")) == targets
                done = lines["drafter"]["batches"] if lines else 0
                if up and done >= warm:
                    waits.append(now - began)
                    last = (now, done, lines["coordinator"]["cpu_seconds"])
                    first = first or last
            summary = ray.get(running, timeout=LIMIT)
        finally:
            ray.kill(coordinator)
    assert first is not None and last[1] > first[1] and summary["finished"], "too few batches to measure"
    return {
        "name": f"coordinator, {targets} targets",
        "batches": last[1] - first[1],
        "batches_per_second": (last[1] - first[1]) / (last[0] - first[0]),
        "cpu_ms_per_batch": 1e3 * (last[2] - first[2]) / (last[1] - first[1]),
        "slowest_status_ms": 1e3 * max(waits),
    }
