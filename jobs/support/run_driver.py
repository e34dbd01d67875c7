"""The driver of a run: checks everything that can be checked, wires the coordinator, shows its lines, and leaves with an exit code.

Nothing is written to the run folder before every check has passed. The driver holds no state of the run: killed, it takes the actors
with it, and `--resume auto` continues from the newest checkpoint.
"""

from __future__ import annotations

import os
import secrets
import signal
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
from dflash_ray.config.loading import merge, validate
from dflash_ray.config.schema import Config
from dflash_ray.doctor.checks import gpu_uses, quick_findings, refuse_blockers
from dflash_ray.machine.environment import environment
from dflash_ray.run.checkpoint import Checkpoint, list_checkpoints, newest_whole, read_checkpoint
from dflash_ray.run.checks import check_data
from dflash_ray.run.folder import RunFolder
from dflash_ray.run.place import RunInfo
from dflash_ray.run.spec import RunSpec, resolve, with_weights
from dflash_ray.watch.power import read_watts
from jobs.support.cli import Failed, Stopped, under_job_submit
from jobs.support.progress import Progress

RAY_ATTEMPTS = 3
SILENCE, MOST_SILENT = 60, 5  # seconds without an answer of the coordinator, and how often before it counts as hung


class CoordinatorHangs(Exception):
    """It answers no more; says for how long."""


@dataclass
class RunPlan:
    spec: RunSpec
    folder: RunFolder
    resume: Path | None


def run_dir(config: Config) -> Path:
    if config.run.dir is not None:
        return Path(config.run.dir).expanduser()
    root = Path.home() / "dflash_ray" if under_job_submit() else Path.cwd()
    return root / "runs" / config.run.name


def prepare(config: Config) -> RunPlan:
    """Every check that needs no actor. ValueError for what the user must change."""
    refuse_relative_paths(config)
    folder = RunFolder(run_dir(config))
    _refuse_no_folder(folder.path)
    resume = _find_resume(config, folder)
    # the target, the data and the machine are looked at before Ray starts: what is wrong is answered at once
    config = _check_power(config)
    early = resolve(config, device="cpu", run_dir=folder.path)
    check_data(early)
    for finding in refuse_blockers(quick_findings(early, gpus=bool(gpu_uses()[0]))):
        print(f"warning: {finding.check}: {finding.what}; {finding.do}", file=sys.stderr)
    early = with_weights(early)
    connect()
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
    namespace = f"dflash-ray-{config.run.name}-{secrets.token_hex(4)}"
    spec = resolve(config, device="cuda" if gpus else "cpu", run_dir=folder.path.absolute(), namespace=namespace)
    return RunPlan(replace(spec, weights=early.weights), folder, resume.path.absolute() if resume else None)


def refuse_relative_paths(config: Config) -> None:
    """ValueError under `ray job submit` for a path that would be looked for in a folder that is thrown away."""
    if not under_job_submit():
        return
    paths = {"run.dir": config.run.dir, "data.path": config.data.path, "target.path": config.target.path}
    for key, path in (paths | {"power.source": config.power.file}).items():
        if path is not None and not Path(path).expanduser().is_absolute():
            raise ValueError(
                f"{key}: {path} is relative, and under `ray job submit` the job runs in a temporary copy of the working directory; "
                "give an absolute path that every node sees"
            )


def _refuse_no_folder(path: Path) -> None:
    """ValueError where no folder can be at `path`."""
    try:
        if path.exists():
            if not path.is_dir():
                raise ValueError(f"run.dir: {path} is a file; give a folder")
            there = path
        else:
            there = next(parent for parent in path.absolute().parents if parent.exists())
            if not there.is_dir():
                raise ValueError(f"run.dir: {path} cannot be made, {there} is a file")
    except OSError as error:
        raise ValueError(f"run.dir: {str(path)[:200]}: {error.strerror}") from None
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"run.dir: {there} cannot be written to; give another folder")


def _check_power(config: Config) -> Config:
    """With the file of watts readable, and found from whatever folder an actor runs in."""
    if config.power.file is None:
        return config
    try:
        read_watts(config.power.file)
    except OSError as error:
        raise ValueError(f"power.source: {config.power.file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"power.source: {error}") from None
    return validate(merge(config.as_dict(), {"power": {"source": f"file:{config.power.file.absolute()}"}}))


def _find_resume(config: Config, folder: RunFolder) -> Checkpoint | None:
    wanted = config.run.resume
    if config.run.fresh:
        if wanted != "never":
            raise ValueError(f"--fresh starts over and --resume {wanted} continues; give one of them")
        return None
    if wanted == "never":
        if folder.holds_a_run():
            raise ValueError(f"run.dir: {folder.path} holds a run already; continue it with --resume auto, or start over with --fresh")
        return None
    if wanted != "auto":
        return read_checkpoint(Path(wanted))
    checkpoint, refused = newest_whole(folder.checkpoints)
    for line in refused:
        print(f"refused: {line}", file=sys.stderr)
    if checkpoint is None and list_checkpoints(folder.checkpoints):
        raise ValueError(f"--resume auto: none of the checkpoints in {folder.checkpoints} is whole; start over with --fresh")
    if checkpoint is None and folder.holds_a_run():
        print(f"--resume auto: no checkpoint in {folder.checkpoints} yet, so the run begins again at its first step")
    return checkpoint


def connect() -> None:
    """Joins the cluster of `ray start` or of the job, or starts a local Ray for this job alone. Failed where there is none to be had."""
    if ray.is_initialized():
        return
    joins = under_job_submit() or bool(os.environ.get("RAY_ADDRESS"))
    attempts = 1 if joins else RAY_ATTEMPTS
    for attempt in range(attempts):
        try:
            if joins:
                ray.init(logging_level="warning")
            else:
                ray.init(address="local", include_dashboard=False, logging_level="warning")
            return
        except ValueError:  # an address that is none
            raise
        except Exception as error:  # Ray has no type of its own for a daemon that did not start in time, as on an overloaded machine
            ray.shutdown()
            if attempt + 1 == attempts:
                raise Failed(f"no Ray: {first_line(error)}") from None
            time.sleep(1)


def drive(plan: RunPlan) -> tuple[dict[str, Any], int]:
    """Runs to the end. Returns the summary and the exit code."""
    spec, folder = plan.spec, plan.folder
    if spec.config.run.fresh and folder.path.exists():
        _clear(folder)
    info = RunInfo(
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
    coordinator = CoordinatorActor.options(**actor_options("coordinator", "coordinator", spec), **on_this_node()).remote(
        spec, plan.resume, _store_bytes(), info
    )
    running = coordinator.run.remote()
    try:
        code = _watch(coordinator)
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


class _Signals:
    """The first Ctrl-C or SIGTERM asks for a checkpoint, the second one ends at once."""

    def __init__(self) -> None:
        self.first: int | None = None

    def __enter__(self) -> _Signals:
        self._before = {number: signal.signal(number, self._on) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _on(self, number: int, _frame: Any) -> None:
        if self.first is not None:
            raise KeyboardInterrupt if number == signal.SIGINT else Stopped
        self.first = number

    def __exit__(self, *_exc: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _watch(coordinator: Any) -> int:
    """Prints the coordinator's lines until it ends. Returns 0, or 130 / 143 if a signal ended it."""
    shown, told, silent = 0, False, 0
    with _Signals() as signals, Progress() as progress:
        while True:
            if signals.first is not None and not told:
                told = True
                name = signal.Signals(signals.first).name
                progress.say(f"{name}: finishing the step, then a checkpoint; once more ends at once, without one")
                coordinator.stop.remote(f"stopped by {name}")
            try:
                report = ray.get(coordinator.reports.remote(shown, 0.5), timeout=SILENCE)
                silent = 0
            except ray.exceptions.GetTimeoutError:
                silent += 1
                if silent == MOST_SILENT:
                    raise CoordinatorHangs(f"the coordinator has not answered for {silent * SILENCE} s") from None
                progress.say(f"the coordinator has not answered for {silent * SILENCE} s; waiting on")
                continue
            for line in report["lines"]:
                progress.say(line)
            shown += len(report["lines"])
            progress.show(report["step"], report["steps"])
            if report["ended"]:
                return 128 + signals.first if told and not report["finished"] else 0
