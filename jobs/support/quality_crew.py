"""The processes of jobs.quality: one lane per GPU, in which runs follow each other as `jobs.train`, `jobs.export`, `jobs.evaluate`.

Every process is an ordinary job with a local Ray of its own: lanes share no temporary folder, and a Ray that this process might join is
hidden from them. A lane goes on after a run that failed.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from dflash_ray.json_file import read_json_object
from dflash_ray.planning.quality import SERVED, Recipe, nearest_epochs, rate_of, read_training, result_of
from dflash_ray.run.folder import RunFolder
from jobs.support.paths import JOB_MARK

PILOT_WARMUP = 20  # steps that compile kernels and fill queues
GUESSED_OVERHEAD = 60.0  # seconds of a run outside its training, until one was seen
LAST_LINES = 6
TRAINED = "quality-training.json"  # in a run's folder, once its training ended well
LIBC = ctypes.CDLL(None)
SET_PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
PATIENCE = 60.0  # seconds for a stopped job to write its checkpoint


class JobFailed(Exception):
    """A job of a run ended with another code than 0; says its last lines."""


@dataclass
class Task:
    """What every run has in common."""

    configs: list[Path]
    flags: list[str]  # settings from the command line
    recipes: dict[str, Recipe]
    steps_per_epoch: dict[str, int]
    targets: dict[str, Path]
    output: Path
    seconds: float
    pilot_steps: int
    serving: list[str]  # flags of jobs.evaluate
    rates: dict[str, float]  # recipe -> steps per second, as far as known
    keys: dict[str, str]  # recipe -> fingerprint of its training and its serving
    training_keys: dict[str, str]  # recipe -> fingerprint of its training alone
    deadline: float | None = None  # of the monotonic clock: no run starts that might end later
    overheads: list[float] = field(default_factory=list)


class Lane:
    """Runs on one GPU (None: on whatever the jobs find), one after the other."""

    def __init__(self, task: Task, gpu: str | None, say: Callable[[str], None]):
        self.task, self.gpu = task, gpu
        self.name = "" if gpu is None else f"GPU {gpu}: "
        self._say = say
        self._temporary: Path | None = None

    async def work(
        self,
        pairs: list[tuple[str, int]],
        measuring: dict[str, asyncio.Lock],
        done: Callable[[dict[str, Any]], None],
        failed: Callable[[str, int, str], None],
    ) -> list[tuple[str, int]]:
        """Tells every result; returns the pairs that there was no time for."""
        self._temporary = Path(tempfile.mkdtemp(prefix="dfq-"))  # short: sockets lie below it, and their paths have at most 107 bytes
        left = []
        try:
            for name, seed in pairs:
                if not self._fits(name):
                    left.append((name, seed))
                    continue
                try:
                    async with measuring[name]:
                        if name not in self.task.rates:
                            self.task.rates[name] = await self._pilot(name)
                    done(await self._run(name, seed))
                except (JobFailed, ValueError, OSError) as error:
                    failed(name, seed, str(error))
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)
        return left

    def _fits(self, name: str) -> bool:
        task = self.task
        if task.deadline is None:
            return True
        overhead = max(task.overheads, default=GUESSED_OVERHEAD)
        return time.monotonic() + task.seconds + overhead * (1 if name in task.rates else 2) < task.deadline

    async def _pilot(self, name: str) -> float:
        """Steps per second of a short run."""
        task, folder = self.task, self.task.output / f"pilot-{name}"
        steps = PILOT_WARMUP + task.pilot_steps
        epochs = math.ceil(steps / task.steps_per_epoch[name])
        self._say(f"{self.name}{name}: measuring its rate over {task.pilot_steps} steps")
        flags = ["--run.max_steps", str(steps), "--validation.batches", "0"]
        await self._train(name, 0, folder, epochs, folder.name, flags)
        rate = rate_of(RunFolder(folder), PILOT_WARMUP)
        shutil.rmtree(folder, ignore_errors=True)
        self._say(f"{self.name}{name}: {rate:.2f} steps/s")
        return rate

    async def _run(self, name: str, seed: int) -> dict[str, Any]:
        task = self.task
        label = f"{name}-seed{seed}"
        folder = task.output / label
        trained = read_training(folder / TRAINED)
        if trained is not None:
            self._say(f"{self.name}{label}: trained by an earlier call, whose serving failed or was stopped")
        else:
            rate = task.rates[name]
            epochs = nearest_epochs(task.seconds, rate, task.steps_per_epoch[name])
            about = epochs * task.steps_per_epoch[name] / rate
            self._say(f"{self.name}{label}: training {epochs} epochs, about {about:.0f} s")
            began = time.monotonic()
            command = await self._train(name, seed, folder, epochs, label)
            trained = {
                "key": task.training_keys[name],
                "epochs": epochs,
                "rate": rate,
                "command": command,
                "seconds": time.monotonic() - began,
            }
            RunFolder(folder).write_json(TRAINED, trained)
        commands, times = [trained["command"]], [time.monotonic()]
        export, served = folder / "export", folder / "evaluation.json"
        commands.append(await self._job("jobs.export", ["--run", str(folder), "--output", str(export)], label))
        times.append(time.monotonic())
        flags = ["--drafter", str(export), "--target", str(task.targets[name]), *task.serving, "--json", str(served), "--card"]
        commands.append(await self._job("jobs.evaluate", flags, label))
        times.append(time.monotonic())
        evaluation = read_json_object(served)
        result = result_of(RunFolder(folder), task.seconds)
        seconds = [trained["seconds"], *(b - a for a, b in pairwise(times))]
        task.overheads.append(sum(seconds) - result["training_seconds"])
        self._say(
            f"{self.name}{label}: {result['steps']} steps in {result['training_seconds']:.1f} s, validation tau "
            f"{result['validation_tau'] or math.nan:.2f}, served tau {evaluation['tau'] or math.nan:.2f}"
        )
        return {
            "recipe": name,
            "seed": seed,
            "gpu": self.gpu,
            "epochs": trained["epochs"],
            "planned_steps_per_second": trained["rate"],
            **result,
            "total_seconds": sum(seconds),
            "process_seconds": dict(zip(("train", "export", "evaluate"), seconds, strict=True)),
            **{key: evaluation[key] for key in SERVED},
            "served_precision": f"{evaluation['precision']} on {evaluation['device']}",
            "environment": read_json_object(folder / "run.json").get("environment"),
            "commands": commands,
        }

    async def _train(self, name: str, seed: int, folder: Path, epochs: int, label: str, more: list[str] | None = None) -> str:
        task = self.task
        flags = [part for path in task.configs for part in ("--config", str(path))]
        flags += [*task.recipes[name].flags(), *task.flags, "--run.seed", str(seed), "--train.epochs", str(epochs), *(more or [])]
        return await self._job("jobs.train", [*flags, "--run.dir", str(folder), "--fresh"], label, first=True)

    async def _job(self, module: str, flags: list[str], label: str, *, first: bool = False) -> str:
        """Runs a job to its end, its output in logs/LABEL.log. Returns the command; JobFailed where its exit code is not 0."""
        log = self.task.output / "logs" / f"{label}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        # a session of its own: Ctrl-C reaches the job once, through us
        with log.open("wb" if first else "ab") as out:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", module, *flags),
                stdout=out,
                stderr=out,
                env=self._environment(),
                start_new_session=True,
                preexec_fn=_stop_with_parent,
            )
            try:
                code = await process.wait()
            finally:
                await _end(process)
        if code:
            lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
            raise JobFailed(f"{module} ended with code {code}: " + "\n".join(lines[-LAST_LINES:]))
        return " ".join(["python", "-m", module, *flags])

    def _environment(self) -> dict[str, str]:
        env = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", JOB_MARK)}
        env |= {"RAY_TMPDIR": str(self._temporary), "PYTHONUNBUFFERED": "1"}
        return env if self.gpu is None else env | {"CUDA_VISIBLE_DEVICES": self.gpu}


def _stop_with_parent() -> None:
    """In a job before it starts: asks for SIGTERM when its parent is gone, which kill -9 leaves no time to tell."""
    LIBC.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Of a job that we leave early: asks it to stop, and makes sure."""
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), PATIENCE)
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def work_all(
    task: Task,
    lanes: dict[str | None, list[tuple[str, int]]],
    done: Callable[[dict[str, Any]], None],
    failed: Callable[[str, int, str], None],
    say: Callable[[str], None],
) -> list[tuple[str, int]]:
    """All lanes at once. Returns the pairs that there was no time for."""
    measuring = {name: asyncio.Lock() for name in task.recipes}
    left = await asyncio.gather(*(Lane(task, gpu, say).work(pairs, measuring, done, failed) for gpu, pairs in lanes.items()))
    return [pair for lane in left for pair in lane]
