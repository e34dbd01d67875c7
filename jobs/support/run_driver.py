"""The driver of a run: wires the coordinator once everything is checked, follows it, and leaves with an exit code.

Nothing is written to the run folder before every check has passed. The driver holds no state of the run: killed, it takes the actors
with it, and `--resume auto` continues from the newest checkpoint.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from actors.answers import cause_of, first_line
from actors.coordinator.actor import LOCK_PATIENCE, CoordinatorActor
from actors.placement import actor_options, gpus_wanted, on_this_node, refuse_too_many_processes
from dflash_ray.config.schema import Config
from dflash_ray.machine.environment import environment
from dflash_ray.run.folder import RunFolder
from dflash_ray.run.place import RunInfo
from dflash_ray.run.spec import RunSpec, resolve
from jobs.support.follow import CoordinatorHangs, follow
from jobs.support.local_ray import connect
from jobs.support.preflight import check


@dataclass
class ReadyRun:
    spec: RunSpec
    folder: RunFolder
    resume: Path | None


def prepare(config: Config) -> ReadyRun:
    """Every check that needs no actor. ValueError for what the user must change."""
    checked = check(config)
    connect()
    device = "cuda" if _gpus(checked.config) else "cpu"
    namespace = f"dflash-ray-{config.run.name}-{secrets.token_hex(4)}"
    spec = resolve(checked.config, device=device, run_dir=checked.folder.path.absolute(), namespace=namespace)
    return ReadyRun(replace(spec, weights=checked.weights), checked.folder, checked.resume)


def _gpus(config: Config) -> float:
    """GPUs of the cluster; ValueError where it cannot hold the run's actors."""
    gpus = ray.cluster_resources().get("GPU", 0.0)
    wanted = gpus_wanted(config.targets, config.placement.gpus_per_target, config.placement.gpus_per_drafter)
    if gpus and wanted > gpus:
        raise ValueError(
            f"topology: {config.topology} wants {config.targets} x {config.placement.gpus_per_target:g} + "
            f"{config.placement.gpus_per_drafter:g} = {wanted:g} GPUs, the cluster has {gpus:g}; use fewer targets or "
            "lower placement.gpus_per_target"
        )
    if not gpus:
        refuse_too_many_processes("topology", config.targets, ray.cluster_resources())
    return gpus


def run_info(spec: RunSpec) -> RunInfo:
    """Where a run of this process lives; Ray is up."""
    return RunInfo(
        ray_address=ray.get_runtime_context().gcs_address,
        namespace=spec.namespace,
        coordinator="coordinator",
        actors=["coordinator", "batcher", "drafter", *(f"target-{i}" for i in range(spec.config.targets))],
        ray_auth_mode=os.environ.get("RAY_AUTH_MODE"),
        pid=os.getpid(),
        node=socket.gethostname(),
        started=time.time(),
        environment=environment(),
    )


def drive(run: ReadyRun) -> tuple[dict[str, Any], int]:
    """Runs to the end. Returns the summary and the exit code."""
    spec, folder = run.spec, run.folder
    if spec.config.run.fresh and folder.path.exists():
        _clear(folder)
    coordinator = CoordinatorActor.options(**actor_options("coordinator", "coordinator", spec), **on_this_node()).remote(
        spec, run.resume, _store_bytes(), run_info(spec)
    )
    running = coordinator.run.remote()
    try:
        code = follow(coordinator)
        summary = ray.get(running, timeout=60)
    except ray.exceptions.RayTaskError as error:
        cause = cause_of(error)
        if isinstance(cause, ValueError):
            raise cause from None
        print(f"failed: {type(cause).__name__}: {first_line(cause)}", file=sys.stderr)
        return {"failed": first_line(cause)}, 1
    except ray.exceptions.RuntimeEnvSetupError as error:
        reason = next((line for line in str(error).splitlines()[::-1] if line.strip()), "no reason given")
        print(f"failed: Ray could not prepare an actor's environment: {reason}", file=sys.stderr)
        return {"failed": reason}, 1
    except (ray.exceptions.RayError, CoordinatorHangs) as error:
        what = str(error) if isinstance(error, CoordinatorHangs) else f"the coordinator died: {first_line(error)}"
        print(f"failed: {what}; --resume auto continues", file=sys.stderr)
        return {"failed": what}, 1
    finally:
        ray.kill(coordinator)  # with it go the actors that it made
    try:
        folder.write_json("summary.json", summary)
    except OSError as error:
        print(f"failed: {folder.path / 'summary.json'}: {error.strerror}", file=sys.stderr)
        return summary, 1
    return summary, code


def _clear(folder: RunFolder, patience: float = LOCK_PATIENCE) -> None:
    """Not under the feet of a run that is still at work; one whose driver was killed may take a moment to end."""
    deadline = time.monotonic() + patience
    while not folder.lock():
        if time.monotonic() > deadline:
            raise ValueError(f"--fresh: another run writes to {folder.path}; stop it first")
        time.sleep(0.5)
    folder.clear()
    folder.unlock()


def _store_bytes() -> int:
    """The smallest object store of the nodes: any of them may have to hold the window."""
    stores = [node["Resources"].get("object_store_memory", 0) for node in ray.nodes() if node["Alive"]]
    return int(min(store for store in stores if store))
