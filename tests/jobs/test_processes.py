"""Jobs as a user runs them: real processes, real signals, a real head node with `ray job submit`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dflash_ray.doctor.cluster import running_heads
from dflash_ray.run.checkpoint import list_checkpoints, read_checkpoint
from dflash_ray.run.folder import RunFolder
from tests.support.processes import PATIENCE, ROOT, alive, end, environment, family, head_node, start_job, wait_until
from tests.support.tiny_runs import tiny_config

pytestmark = pytest.mark.ray

SLOW_TARGET = {"debug": {"target_delay_seconds": 0.3}, "train": {"epochs": 6, "batches_per_step": 2}}


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("material")


def write_config(material: Path, folder: Path, /, **sections) -> Path:
    path = folder.parent / f"{folder.name}.yaml"
    path.write_text(yaml.safe_dump(tiny_config(material, folder, **sections)))
    return path


def steps(run: Path) -> int:
    return len(RunFolder(run).read("metrics.jsonl"))


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_a_checkpoint_and_no_process(material, tmp_path, number, code):
    run, log = tmp_path / "run", tmp_path / "log"
    job = start_job("jobs.train", "--config", str(write_config(material, run, **SLOW_TARGET)), log=log)
    try:
        wait_until(lambda: steps(run) >= 3 or job.poll() is not None, "three steps")
        assert job.poll() is None, log.read_text()
        processes = family(job.pid)
        assert len(processes) > 4
        os.kill(job.pid, number)
        assert job.wait(timeout=PATIENCE) == code, log.read_text()
        wait_until(lambda: not alive(processes), "the processes of the job to end")
    finally:
        end(job)
    done = steps(run)
    checkpoint = read_checkpoint(list_checkpoints(run / "checkpoints")[-1])
    assert checkpoint.step == done and checkpoint.next_batch == 2 * done
    assert [event["event"] for event in RunFolder(run).read("events.jsonl")][-1] == "checkpoint"
    assert not list((run / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_a_killed_driver_takes_its_actors_with_it_and_the_run_continues(material, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    config = write_config(material, run, checkpoint={"every_steps": 2}, **SLOW_TARGET)
    job = start_job("jobs.train", "--config", str(config), log=log)
    try:
        wait_until(lambda: len(list_checkpoints(run / "checkpoints")) >= 1 or job.poll() is not None, "a checkpoint")
        actors = [pid for pid in family(job.pid) if b"Actor" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(actors) == 4
        os.kill(job.pid, signal.SIGKILL)
        job.wait(timeout=30)
        wait_until(lambda: not alive(actors), "the actors to follow their driver", limit=30)
    finally:
        end(job)
    last = read_checkpoint(list_checkpoints(run / "checkpoints")[-1]).step + 2
    again = start_job("jobs.train", "--config", str(config), "--resume", "auto", "--run.max_steps", str(last), log=log)
    try:
        assert again.wait(timeout=PATIENCE) == 0, log.read_text()
    finally:
        end(again)
    trained = RunFolder(run).read("trained.jsonl")
    assert [record["batch"] for record in trained] == list(range(2 * last))
    assert [record["step"] for record in RunFolder(run).read("metrics.jsonl")] == list(range(1, last + 1))


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A clone as a user has it, with a virtual environment and earlier runs that must not be uploaded."""
    folder = tmp_path_factory.mktemp("clone") / "dflash-ray"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".pytest_cache", ".hypothesis"))
    for heavy in (folder / ".venv", folder / "runs"):
        heavy.mkdir()
        with (heavy / "large").open("wb") as file:
            file.truncate(200 * 2**20)
    return folder


def ray_command(*argv: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "ray.scripts.scripts", "job", *argv]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=3 * PATIENCE, check=False)


def submit(clone: Path, head: dict[str, str], name: str, *argv: str, wait: bool = True) -> subprocess.CompletedProcess:
    flags = ["--address", head["dashboard"], "--working-dir", ".", "--submission-id", name] + ([] if wait else ["--no-wait"])
    return ray_command("submit", *flags, "--", sys.executable, "-m", "jobs.train", *argv, cwd=clone)


def logs(head: dict[str, str], name: str) -> str:
    """What the job printed; what `submit` shows of a short job may end early."""
    return ray_command("logs", "--address", head["dashboard"], name).stdout


def actors_under(head: dict[str, str]) -> list[int]:
    """Processes of this head node that are actors of ours."""
    return [pid for pid in family(int(head["pid"])) if re.search(rb"(Coordinator|Batcher|Target|Drafter)Actor", command_of(pid))]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""  # it has just ended


@pytest.mark.timeout(1200)
def test_ray_job_submit_trains_refuses_stops_and_continues(material, clone, tmp_path):
    with head_node(tmp_path / "head", RAY_JOB_STOP_WAIT_TIME_S="60") as head:
        done = submit(clone, head, "short", "--config", str(write_config(material, tmp_path / "run", run={"max_steps": 4})))
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(r"step 4/\d+ \| loss", logs(head, "short")) and steps(tmp_path / "run") == 4
        assert "60" in [one.get("RAY_JOB_STOP_WAIT_TIME_S") for one in running_heads()]
        facts = json.loads((tmp_path / "run" / "run.json").read_text())
        assert facts["environment"]["versions"]["torch"]
        assert facts["namespace"].startswith("dflash-ray-tiny-") and facts["pid"]
        relative = submit(clone, head, "relative", "--config", "jobs/configs/qwen3.6-27b.yaml", "--run.dir", "runs/here")
        assert relative.returncode != 0 and "absolute path" in logs(head, "relative")

        run = tmp_path / "long"
        submit(clone, head, "long", "--config", str(write_config(material, run, **SLOW_TARGET)), wait=False)
        wait_until(lambda: steps(run) >= 2, "two steps of the submitted job")
        assert len(actors_under(head)) == 4
        assert ray_command("stop", "--address", head["dashboard"], "long").returncode == 0
        stopped = steps(run)
        assert read_checkpoint(list_checkpoints(run / "checkpoints")[-1]).step == stopped
        wait_until(lambda: not actors_under(head), "the actors of the stopped job to end", limit=30)

        again = write_config(material, run, run={"max_steps": stopped + 2}, train=SLOW_TARGET["train"])
        refused = submit(clone, head, "overwrite", "--config", str(again))
        assert refused.returncode != 0 and "holds a run already" in logs(head, "overwrite") and steps(run) == stopped
        done = submit(clone, head, "resumed", "--config", str(again), "--resume", "auto")
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"resumed: from {run}/checkpoints" in logs(head, "resumed")
        assert [record["step"] for record in RunFolder(run).read("metrics.jsonl")] == list(range(1, stopped + 3))
        trained = [record["batch"] for record in RunFolder(run).read("trained.jsonl")]
        assert trained == list(range(2 * (stopped + 2)))
