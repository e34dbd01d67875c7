"""Two runs side by side on one cluster, looked at, re-sized and kept under a power budget from other shells."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from dflash_ray.run.folder import RunFolder
from tests.support.processes import ROOT, end, environment, head_node, pause, start_job, wait_until
from tests.support.tiny_runs import tiny_config

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

LONG_PATIENCE = 400.0  # a dozen processes start here

LONG = {"train": {"epochs": 1000, "batches_per_step": 2}, "debug": {"target_delay_seconds": 0.4}}


@dataclass
class Cluster:
    head: dict[str, str]
    alpha: Path  # started by `python -m jobs.train` that joined the cluster, 2-1, with watts from a file
    beta: Path  # started by `ray job submit`, 1-1
    watts: Path
    watching: list[subprocess.Popen]

    def job(self, *argv: str) -> subprocess.CompletedProcess:
        """Another shell that knows nothing of the cluster."""
        return subprocess.run(
            [sys.executable, "-m", *argv], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LONG_PATIENCE, check=False
        )

    def status(self, run: Path) -> dict[str, dict]:
        """The newest line of `jobs.status --watch --json`, with the actors by name."""
        status = json.loads(run.with_suffix(".watch").read_bytes().split(b"\n")[-2])
        return status | {"actors": {actor["name"]: actor for actor in status["actors"]}}

    def wait_for(self, run: Path, condition: Callable[[dict], bool], what: str) -> dict:
        wait_until(lambda: condition(self.status(run)), what, limit=LONG_PATIENCE)
        return self.status(run)


def ray_command(head: dict[str, str], *argv: str) -> str:
    command = [sys.executable, "-m", "ray.scripts.scripts", *argv, "--address", head["dashboard"]]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LONG_PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write_config(material: Path, folder: Path, /, **sections) -> str:
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(tiny_config(material, folder, **LONG, **sections)))
    return str(path)


def steps(run: Path) -> int:
    return len(RunFolder(run).read("metrics.jsonl"))


def events(run: Path, kind: str) -> list[dict]:
    return [event for event in RunFolder(run).read("events.jsonl") if event["event"] == kind]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("operate")
    material, alpha, beta, watts = folder / "material", folder / "alpha", folder / "beta", folder / "watts"
    watts.write_text("target-0 300\ntarget-1 310\ndrafter 400\n")
    power = {"source": f"file:{watts}", "budget_watts": 2000, "every_seconds": 0.2}
    watching: list[subprocess.Popen] = []
    with head_node(folder / "head", RAY_metrics_report_interval_ms="500", RAY_JOB_STOP_WAIT_TIME_S="60") as head:
        config = write_config(material, alpha, run={"name": "alpha"}, topology="2-1", power=power, tracking={"kind": "tensorboard"})
        job = start_job("jobs.train", "--config", config, log=folder / "log", RAY_ADDRESS=head["gcs"])
        config = write_config(material, beta, run={"name": "beta"})
        entry = [sys.executable, "-m", "jobs.train", "--config", config]
        command = ["job", "submit", "--working-dir", ".", "--no-wait", "--submission-id", "beta", "--address", head["dashboard"]]
        command = [sys.executable, "-m", "ray.scripts.scripts", *command, "--", *entry]
        subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, timeout=LONG_PATIENCE, check=True)
        try:
            wait_until(lambda: (steps(alpha) and steps(beta)) or job.poll() is not None, "first steps of both runs", limit=LONG_PATIENCE)
            assert job.poll() is None, (folder / "log").read_text()
            for run in (alpha, beta):
                watching.append(start_job("jobs.status", "--watch", "--json", "--run", str(run), log=run.with_suffix(".watch")))
            for run in (alpha, beta):
                wait_until(lambda: b"}\n" in run.with_suffix(".watch").read_bytes(), "the first status")  # noqa: B023
            yield Cluster(head, alpha, beta, watts, watching)
        finally:
            for process in (*watching, job):
                end(process)


def working(status: dict) -> set[str]:
    return {name for name, actor in status["actors"].items() if actor["state"] == "working" and "pid" in actor}


REST = {"drafter", "batcher", "coordinator"}


def test_status_shows_every_actor_of_the_run_asked_for(cluster):
    alpha = cluster.wait_for(cluster.alpha, lambda status: working(status) == REST | {"target-0", "target-1"}, "all actors of alpha")
    beta = cluster.wait_for(cluster.beta, lambda status: working(status) == REST | {"target-0"}, "all actors of beta")
    for status in (alpha, beta):
        assert status["state"] == "running" and 0 < status["step"] < status["steps"]
        for actor in status["actors"].values():
            assert actor["rss_bytes"] > 0 and actor["node"] and actor["restarts"] == 0
    assert not {a["pid"] for a in alpha["actors"].values()} & {a["pid"] for a in beta["actors"].values()}
    assert alpha["actors"]["target-1"]["watts"] == 310 and alpha["power"]["watts"] == 1010 and beta["power"]["watts"] is None
    table = cluster.job("jobs.status", "--run", str(cluster.alpha)).stdout
    assert re.search(r"target-1 +working .* 310 W", table) and "q_pre=[" in table and "ETA" in table and "1,010 W of 2,000 W" in table


def test_status_answers_while_others_hang(cluster):
    hung = ("drafter", "batcher", "target-0")
    pids = [actor["pid"] for name, actor in cluster.status(cluster.alpha)["actors"].items() if name in hung]
    assert len(pids) == 3

    def silent(status: dict) -> set[str]:
        return {name for name, actor in status["actors"].items() if (actor["silent_seconds"] or 0) > 4}

    with pause(pids[0]), pause(pids[1]), pause(pids[2]):
        cluster.wait_for(cluster.alpha, lambda status: silent(status) >= set(hung), "three silent actors")
    before = steps(cluster.alpha)
    wait_until(lambda: steps(cluster.alpha) > before, "the run to go on")
    assert not events(cluster.alpha, "target_restart") and not events(cluster.alpha, "drafter_restart")


@pytest.mark.slow
def test_targets_come_and_go_and_the_losses_do_not_change(cluster):
    def scale(run: Path, before: int, count: int) -> None:
        done = cluster.job("jobs.scale", "--targets", str(count), "--run", str(run))
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(rf"{before} -> {count} targets at step [\d,]+\n", done.stdout)
        event = events(run, "scaled")[-1]
        assert event["targets"] == count and f"at step {event['step']}" in event["reason"]
        targets = {f"target-{number}" for number in range(count)}
        cluster.wait_for(run, lambda status: working(status) == REST | targets, f"{count} targets at work")
        after = len(RunFolder(run).read("trained.jsonl"))
        wait_until(lambda: len(RunFolder(run).read("trained.jsonl")) > after + 6, "the run to go on")

    for count in ("3", "2"):  # the third leaves while it starts, and comes back under its name
        assert cluster.job("jobs.scale", "--targets", count, "--run", str(cluster.alpha)).returncode == 0
    scale(cluster.alpha, 2, 3)
    scale(cluster.alpha, 3, 1)
    scale(cluster.alpha, 1, 2)
    scale(cluster.beta, 1, 2)
    assert {record["target"] for record in RunFolder(cluster.alpha).read("trained.jsonl")} >= {"target-0", "target-1"}
    alpha, beta = ([record["loss"] for record in RunFolder(run).read("metrics.jsonl")] for run in (cluster.alpha, cluster.beta))
    same = min(len(alpha), len(beta))
    assert same > 5 and alpha[:same] == beta[:same]
    refused = cluster.job("jobs.scale", "--targets", "0", "--run", str(cluster.alpha))
    assert refused.returncode == 2 and refused.stderr == "error: --targets 0: a run needs at least 1\n"
    refused = cluster.job("jobs.scale", "--targets", "99999", "--run", str(cluster.alpha))
    assert refused.returncode == 2 and "targets: 99,999 targets are 100,002 processes x 0.3 GB" in refused.stderr
    assert events(cluster.alpha, "scaled")[-1]["targets"] == 2


def test_the_power_budget_parks_a_target_and_wakes_it(cluster):
    alpha = cluster.alpha
    cluster.watts.write_text("0 1100\n1 1000\n")
    wait_until(lambda: events(alpha, "power_over_budget"), "the last target to be left at work")
    (parked,) = events(alpha, "parked")
    assert parked["at_work"] == 1 and parked["watts"] == 2100
    cluster.wait_for(alpha, lambda status: status["actors"][parked["actor"]]["state"] == "parked", "the status to say so")
    before = steps(alpha)
    wait_until(lambda: steps(alpha) > before + 2, "the run to go on with one")
    record = RunFolder(alpha).read("metrics.jsonl")[-1]
    assert record["targets"] == 1 and record["parked"] == 1 and record["watts"] > 0 and record["tokens_per_joule"] > 0
    cluster.watts.write_text("0 1900\n")  # below the budget, not below 0.9 of it
    cluster.wait_for(alpha, lambda status: status["power"]["watts"] == 1900, "the reading")
    before = steps(alpha)
    wait_until(lambda: steps(alpha) > before + 6, "some time")
    assert not events(alpha, "woken")
    cluster.watts.write_text("torn")
    wait_until(lambda: events(alpha, "power_unreadable"), "the unreadable file to be told")
    cluster.watts.write_text("0 900\n")
    wait_until(lambda: events(alpha, "woken"), "the target to wake")
    assert len(events(alpha, "parked")) == 1 and events(alpha, "woken")[0]["actor"] == parked["actor"]
    cluster.watts.write_text("target-0 300\ntarget-1 310\ndrafter 400\n")
    assert not events(cluster.beta, "parked")


def test_ray_metrics_keep_the_runs_apart_and_feed_the_dashboard(cluster):
    address = f"http://127.0.0.1:{cluster.head['metrics_port']}/metrics"

    def series(run: str) -> set[tuple[str, str]]:
        with urllib.request.urlopen(address, timeout=30) as answer:
            text = answer.read().decode()
        lines = [line for line in text.splitlines() if line.startswith("ray_dflash_") and f'run="{run}"' in line]
        return {(line.partition("{")[0], re.search(r'actor="([^"]+)"', line)[1]) for line in lines}

    wanted = {("ray_dflash_q_pre", "target-0"), ("ray_dflash_memory_bytes", "batcher"), ("ray_dflash_loss", "drafter")}
    wait_until(lambda: wanted <= series("alpha") and wanted <= series("beta"), "the metrics of both runs")
    assert ("ray_dflash_watts", "target-0") not in series("beta")
    dashboard = json.loads((ROOT / "dflash_ray" / "watch" / "grafana" / "dflash_ray.json").read_text())
    shown = set(re.findall(r"ray_dflash_\w+", " ".join(t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", []))))
    wait_until(lambda: shown <= {name for name, _ in series("alpha")}, f"all of {sorted(shown)}")
    assert len(shown) > 10


def test_names_read_well_and_are_not_shared(cluster):
    lines = [line for line in ray_command(cluster.head, "list", "actors", "--limit", "100").splitlines() if "ALIVE" in line]
    for run in (cluster.alpha, cluster.beta):
        namespace = json.loads((run / "run.json").read_text())["namespace"]
        assert f"dflash-ray-{run.name}-" in namespace
    for name in ("coordinator", "batcher", "drafter", "target-0"):
        assert sum(f" {name} " in line for line in lines) == 2, lines


def test_an_ended_run_says_so(cluster):
    assert list((cluster.alpha / "tensorboard").glob("events.*"))
    ray_command(cluster.head, "job", "stop", "beta")
    assert cluster.watching[1].wait(timeout=LONG_PATIENCE) == 0
    assert re.search(r"the run in \S+ has (just )?(ended|failed)", cluster.beta.with_suffix(".watch").read_text())
    done = cluster.job("jobs.scale", "--targets", "2", "--run", str(cluster.beta))
    assert done.returncode == 2 and re.fullmatch(r"error: the run in \S+ has (just )?(ended|failed)[^\n]*\n", done.stderr)
    assert cluster.status(cluster.alpha)["state"] == "running" and cluster.watching[0].poll() is None
