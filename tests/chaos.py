"""Random faults from a seed, for as long as asked: `python -m tests.chaos --minutes M --seed S [--topology 2-1]`.

A tiny run goes on again and again while actors, driver and machine are killed, stopped and continued and checkpoints are damaged. Each
round must end with the weights of an undisturbed run, to the bit, and with every sample of every epoch trained once. Prints a table; exit
code 1 if a round did not.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from dflash_ray.run.checkpoint import list_checkpoints
from dflash_ray.run.folder import RunFolder
from tests.support.faults import account, actors, losses_of, send, state_of, title
from tests.support.processes import alive, end, family, start_job
from tests.support.tiny_runs import dense_material, tiny_config

SAMPLES, STEPS = 40, 60
SETTINGS = {
    "train": {"epochs": 12, "batches_per_step": 2},
    "run": {"max_steps": STEPS},
    "checkpoint": {"every_steps": 3},
    "flow": {"restarts_per_hour": 100_000, "deaths_per_batch": 100_000, "deadline_min_seconds": 10.0, "prefetch_batches": 8},
}
PATIENCE = 400.0  # seconds for a step after a fault, before the run counts as stuck


class Stuck(Exception):
    """No step for PATIENCE seconds."""


@dataclass
class Round:
    """One run from its start to its end, through as many drivers as it takes."""

    config: Path
    folder: RunFolder
    log: Path
    rng: random.Random
    job: subprocess.Popen | None = None
    stopped: list[int] = field(default_factory=list)

    def start(self, *flags: str) -> None:
        self.job = start_job("jobs.train", "--config", str(self.config), *flags, log=self.log)

    def ended(self) -> bool:
        return self.job.poll() is not None

    def steps(self) -> int:
        records = self.folder.read("metrics.jsonl") if self.folder.path.exists() else []
        return records[-1]["step"] if records else 0

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition() and not self.ended():
            if time.monotonic() > deadline:
                raise Stuck(f"no {what} for {PATIENCE:.0f} s; {self.log}:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.05)

    def wait_for_steps(self, count: int) -> None:
        before = self.steps()
        self.wait_for(lambda: not before <= self.steps() < before + count, "step")

    def some(self, role: str) -> int | None:
        pids = actors(self.job.pid, role)
        return self.rng.choice(pids) if pids else None

    # ---- faults: each returns whether it could be done ------------------------------------------------------------------------

    def kill(self, role: str) -> bool:
        pid = self.some(role)
        return pid is not None and send(pid, signal.SIGKILL)

    def kill_all_targets(self) -> bool:
        return any([send(pid, signal.SIGKILL) for pid in actors(self.job.pid, "target")])

    def kill_all_actors(self) -> bool:
        roles = ("target", "drafter", "batcher")
        return any([send(pid, signal.SIGKILL) for role in roles for pid in actors(self.job.pid, role)])

    def hang(self, role: str) -> bool:
        """Stopped for good: only the deadline can tell."""
        pid = self.some(role)
        return pid is not None and send(pid, signal.SIGSTOP)

    def pause(self, role: str) -> bool:
        pid = self.some(role)
        if pid is None or not send(pid, signal.SIGSTOP):
            return False
        time.sleep(self.rng.uniform(0.2, 3.0))  # a stall that is no death
        return send(pid, signal.SIGCONT)

    def end_driver(self, number: int) -> bool:
        pids = family(self.job.pid)
        os.kill(self.job.pid, number)
        self.job.wait(timeout=PATIENCE)
        self._resume(pids)
        return True

    def kill_machine(self) -> bool:
        """Everything at once, the daemons of Ray included."""
        pids = family(self.job.pid)
        end(self.job)
        self._resume(pids)
        return True

    def kill_coordinator(self) -> bool:
        pids = family(self.job.pid)
        if not self.kill("coordinator"):
            return False
        self.job.wait(timeout=PATIENCE)
        self._resume(pids)
        return True

    def damage_newest(self) -> bool:
        """The machine dies and its newest checkpoint is damaged."""
        pids = family(self.job.pid)
        end(self.job)
        found = list_checkpoints(self.folder.checkpoints)
        if len(found) > 1:
            state = found[-1] / "state.safetensors"
            data = bytearray(state.read_bytes())
            if self.rng.random() < 0.5:
                data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            else:
                del data[self.rng.randrange(len(data)) :]
            state.write_bytes(bytes(data))
        self._resume(pids)
        return len(found) > 1

    def _resume(self, pids: list[int]) -> None:
        deadline = time.monotonic() + 60
        while alive([pid for pid in pids if "Actor" in title(pid)]):
            if time.monotonic() > deadline:
                raise Stuck(f"actors outlive their driver: {[title(pid) for pid in alive(pids)]}")
            time.sleep(0.1)
        started = RunFolder(self.folder.path).holds_a_run()
        self.start(*(["--resume", "auto"] if started else []))


FAULTS: dict[str, Callable[[Round], bool]] = {
    "target killed": lambda r: r.kill("target"),
    "all targets killed": Round.kill_all_targets,
    "drafter killed": lambda r: r.kill("drafter"),
    "batcher killed": lambda r: r.kill("batcher"),
    "every actor killed": Round.kill_all_actors,
    "target stopped for good": lambda r: r.hang("target"),
    "drafter stopped for good": lambda r: r.hang("drafter"),
    "target stalled": lambda r: r.pause("target"),
    "drafter stalled": lambda r: r.pause("drafter"),
    "coordinator stalled": lambda r: r.pause("coordinator"),
    "coordinator killed": Round.kill_coordinator,
    "driver killed": lambda r: r.end_driver(signal.SIGKILL),
    "driver told to stop (SIGTERM)": lambda r: r.end_driver(signal.SIGTERM),
    "machine killed": Round.kill_machine,
    "machine killed, checkpoint damaged": Round.damage_newest,
}


@dataclass
class Report:
    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    equal: int = 0
    batches: int = 0
    lost: int = 0
    repeated: int = 0
    seconds: float = 0.0
    trouble: str | None = None

    @property
    def passed(self) -> bool:
        return self.trouble is None and self.rounds == self.equal > 0 and not self.lost and not self.repeated

    def show(self, console: Console) -> None:
        table = Table("fault", "times", box=None, pad_edge=False)
        for name in FAULTS:
            table.add_row(name, str(self.faults[name]))
        table.add_section()
        for name, value in (
            ("seed", self.seed),
            ("minutes", f"{self.seconds / 60:.1f}"),
            ("faults", sum(self.faults.values())),
            ("runs, with the weights of the undisturbed one", f"{self.rounds}, {self.equal}"),
            ("batches trained", self.batches),
            ("samples lost, repeated", f"{self.lost}, {self.repeated}"),
            ("passed", "yes" if self.passed else f"NO {self.trouble or ''}"),
        ):
            table.add_row(name, str(value))
        console.print(table)


def _config(folder: Path, name: str, topology: str, **debug: float) -> Path:
    path = folder / f"{name}.yaml"
    tree = tiny_config(folder / "material", folder / name, topology=topology, debug=debug, **SETTINGS)
    path.write_text(yaml.safe_dump(tree))
    return path


def chaos(folder: Path, minutes: float, seed: int, topology: str = "2-1", say: Callable[[str], None] = lambda _: None) -> Report:
    """Rounds until `minutes` are over; the last one is brought to its end."""
    report, began, rng = Report(seed), time.monotonic(), random.Random(seed)
    dense_material(folder / "material")
    calm = Round(_config(folder, "calm", "1-1"), RunFolder(folder / "calm"), folder / "calm.log", rng)
    calm.start()
    assert calm.job.wait(timeout=600) == 0, calm.log.read_text()
    truth = state_of(calm.folder), losses_of(calm.folder)
    say(f"undisturbed run: {time.monotonic() - began:.0f} s")
    until = time.monotonic() + 60 * minutes
    while time.monotonic() < until and report.trouble is None:
        name = f"run-{report.rounds}"
        one = Round(_config(folder, name, topology, target_delay_seconds=0.1), RunFolder(folder / name), folder / f"{name}.log", rng)
        one.start()
        try:
            _one_round(one, report, until, say)
            if (state_of(one.folder), losses_of(one.folder)) == truth:
                report.equal += 1
            else:
                report.trouble = f"{name}: other weights or losses than the undisturbed run"
        except Stuck as error:
            report.trouble = str(error)
        finally:
            end(one.job)
        lost, repeated = account(one.folder, SAMPLES)
        report.rounds += 1
        report.lost, report.repeated = report.lost + lost, report.repeated + repeated
        report.batches += len(one.folder.read("trained.jsonl"))
        say(f"{name}: {len(one.folder.read('events.jsonl'))} events, equal {report.equal} of {report.rounds}")
    report.seconds = time.monotonic() - began
    return report


def _one_round(one: Round, report: Report, until: float, say: Callable[[str], None]) -> None:
    overloaded = 0
    while True:
        one.wait_for_steps(1 + one.rng.randint(0, 6))
        if one.ended():
            if one.job.returncode == 0:
                return
            if "failed: no Ray" in one.log.read_text() and (overloaded := overloaded + 1) < 5:
                one._resume([])  # the machine is too busy for a Ray; that says nothing about the run
                continue
            raise Stuck(f"exit code {one.job.returncode}: {one.log.read_text()[-3000:]}")
        if time.monotonic() > until:
            one.wait_for(lambda: False, "end")  # no more faults
            continue
        fault = one.rng.choice(list(FAULTS))
        time.sleep(one.rng.uniform(0, 0.5))  # any moment of a step
        if one.ended():
            continue
        if FAULTS[fault](one):
            report.faults[fault] += 1
            say(f"{time.strftime('%H:%M:%S')} step {one.steps()}: {fault}")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--topology", default="2-1")
    parser.add_argument("--folder", type=Path, default=None, help="kept afterwards; default a temporary one")
    flags = parser.parse_args(argv)
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        folder = flags.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        report = chaos(folder, flags.minutes, flags.seed, flags.topology, lambda text: print(text, flush=True))
    report.show(console)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
