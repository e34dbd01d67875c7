"""Kills, stops and continues actors of a run in named phases, from outside, and compares what is left with an undisturbed run.

Ray writes the running method into a process's title (`ray::TargetActor.compute`), so a phase is seen in /proc, not guessed from time.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dflash_ray.run.checkpoint import list_checkpoints, read_checkpoint
from dflash_ray.run.folder import TRAINED, RunFolder
from tests.support.processes import PATIENCE, family

ROLES = {"target": "TargetActor", "drafter": "DrafterActor", "batcher": "BatcherActor", "coordinator": "CoordinatorActor"}


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return ""


TITLE = re.compile(r"ray::(?:[^:]+:)?(\w+Actor)(?:\.(\w+))?$")  # ray::[name:]Class[.method]


def doing(pid: int) -> tuple[str, str] | None:
    """(class, running method or "") of an actor's process; `train` is several micro-steps in one call, too."""
    match = TITLE.match(title(pid))
    return (match.group(1), (match.group(2) or "").removesuffix("_group")) if match else None


def actors(root: int, role: str, method: str | None = None) -> list[int]:
    """Pids of the actors of `role` below the process `root`; `method` "" means idle, None whatever it does."""
    found = {pid: doing(pid) for pid in family(root)}
    ours = {pid: what[1] for pid, what in found.items() if what and what[0] == ROLES[role]}
    return sorted(pid for pid, running in ours.items() if method is None or running == method)


def send(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


@dataclass
class Saboteur:
    """Runs `script(self)` in a thread while a run goes on in this process or in the process `root`."""

    script: Callable[[Saboteur], None]
    folder: RunFolder
    root: int = field(default_factory=os.getpid)
    error: BaseException | None = None

    def __enter__(self) -> Saboteur:
        self.over = threading.Event()
        self.stopped: list[int] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.over.set()
        self.thread.join(timeout=30)
        for pid in self.stopped:
            send(pid, signal.SIGCONT)
        if kind is None and self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            self.script(self)
        except BaseException as error:
            self.error = error

    def until(self, condition: Callable[[], object], what: str, limit: float = PATIENCE) -> object:
        deadline = time.monotonic() + limit
        while not (value := condition()):
            assert not self.over.is_set(), f"the run ended before {what}"
            assert time.monotonic() < deadline, f"waited {limit:.0f} s for {what}"
            time.sleep(0.002)  # a look at other processes
        return value

    def steps(self) -> int:
        return len(self.folder.read("metrics.jsonl"))

    def events(self, *kinds: str) -> list[dict]:
        return [event for event in self.folder.read("events.jsonl") if event["event"] in kinds]

    def seen(self, role: str, method: str | None = None, count: int = 1) -> list[int]:
        """Pids of at least `count` actors of `role` that run `method`."""
        known: list[int] = []
        looked = 0.0

        def look() -> list[int]:
            nonlocal known, looked
            if time.monotonic() - looked > 0.5:  # all processes now and then, those known all the time: a method may take a millisecond
                known, looked = actors(self.root, role), time.monotonic()
            return [pid for pid in known if doing(pid) == (ROLES[role], method if method is not None else (doing(pid) or "  ")[1])]

        def spin() -> list[int]:
            end = time.monotonic() + 0.1
            while time.monotonic() < end:
                if len(found := look()) >= count:
                    return found
            return []

        return self.until(spin, f"{count} {role} in {'any state' if method is None else method or 'idleness'}")

    def kill(self, role: str, method: str | None = None) -> int:
        """Kills one actor of `role` while it runs `method`, and returns its pid."""
        while True:
            for pid in self.seen(role, method):
                if send(pid, signal.SIGKILL):
                    self.gone(pid)
                    return pid

    def gone(self, pid: int) -> None:
        self.until(lambda: not title(pid), f"process {pid} to end")

    def stop(self, role: str, method: str | None = None) -> int:
        pid = self.seen(role, method)[0]
        send(pid, signal.SIGSTOP)
        self.stopped.append(pid)
        return pid


def state_of(folder: RunFolder) -> tuple[int, dict[str, bytes]]:
    """Step and every tensor of the newest checkpoint, to the bit."""
    checkpoint = read_checkpoint(list_checkpoints(folder.checkpoints)[-1])
    return checkpoint.step, {name: tensor.numpy().tobytes() for name, tensor in checkpoint.tensors().items()}


def losses_of(folder: RunFolder) -> list[tuple[str, ...]]:
    """Exact values, raw and smoothed: a float's hex has every bit."""
    return [tuple(float(record[key]).hex() for key in ("step", "loss", "loss_smooth")) for record in folder.read("metrics.jsonl")]


def account(folder: RunFolder, samples: int) -> tuple[int, int]:
    """(samples lost, samples repeated) over the whole epochs among trained and set aside batches."""
    trained = {record["batch"]: record["sample_ids"] for record in folder.read("trained.jsonl")}
    twice = len(folder.read("trained.jsonl")) - len(trained)
    aside = {e["batch"]: e["sample_ids"] for e in folder.read("events.jsonl") if e["event"] == "set_aside" and e["line"] == "train"}
    lost = repeated = 0
    ids = [sample for batch in sorted({**aside, **trained}) for sample in {**aside, **trained}[batch]]
    for first in range(0, len(ids) - samples + 1, samples):
        epoch = ids[first : first + samples]
        lost += samples - len(set(epoch))
        repeated += len(epoch) - len(set(epoch))
    holes = set(range(max(trained | aside, default=-1) + 1)) - set(trained | aside)
    return lost + len(holes), repeated + twice


def assert_same(folder: RunFolder, undisturbed: RunFolder) -> None:
    """Weights and losses to the bit, the same batches in the same order, and every one of 40 samples once per epoch."""
    assert state_of(folder) == state_of(undisturbed)
    assert losses_of(folder) == losses_of(undisturbed)
    assert [record["batch"] for record in folder.read(TRAINED)] == [record["batch"] for record in undisturbed.read(TRAINED)]
    assert account(folder, 40) == (0, 0)
