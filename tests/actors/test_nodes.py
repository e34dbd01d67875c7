"""A node that joins a running job, takes its targets, and leaves again."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from dflash_ray.run.folder import RunFolder
from tests.support.faults import account, losses_of, state_of
from tests.support.processes import PATIENCE, ROOT, end, environment, head_node, node, start_job, wait_until
from tests.support.tiny_runs import dense_material, tiny_config, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RUN = {"train": {"epochs": 9, "batches_per_step": 2}, "run": {"max_steps": 50}, "checkpoint": {"every_steps": 10}}


def test_a_run_grows_onto_a_node_that_joins_and_goes_on_when_it_leaves(local_ray, tmp_path):
    material, run, log = dense_material(tmp_path / "material"), tmp_path / "run", tmp_path / "log"
    undisturbed, _, code = train(material, tmp_path / "undisturbed", **RUN)
    assert code == 0
    folder, config = RunFolder(run), tmp_path / "run.yaml"
    sections = {"placement": {"target_resources": {"room": 1}}, "debug": {"target_delay_seconds": 4.0}, "flow": {"restarts_per_hour": 1000}}
    config.write_text(yaml.safe_dump(tiny_config(material, run, **RUN, **sections)))

    def at_work() -> int:
        steps = folder.read("metrics.jsonl")
        return steps[-1]["targets"] if steps else 0

    def until(targets: int, what: str) -> None:
        wait_until(lambda: at_work() == targets or job.poll() is not None, what)
        assert job.poll() is None, log.read_text()

    def scale(targets: int) -> None:
        command = [sys.executable, "-m", "jobs.scale", "--targets", str(targets), "--run", str(run)]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stderr

    with head_node(tmp_path / "head", resources='{"room": 1}') as head:
        job = start_job("jobs.train", "--config", str(config), log=log, RAY_ADDRESS=head["gcs"])
        try:
            until(1, "the first step")
            with node(head, tmp_path, room=2) as second:
                scale(3)
                until(3, "targets on the node that joined")
                end(second)
                until(1, "the run to go on without it")
            scale(1)
            assert job.wait(timeout=PATIENCE) == 0, log.read_text()
        finally:
            end(job)
    assert state_of(folder) == state_of(undisturbed) and losses_of(folder) == losses_of(undisturbed)
    assert account(folder, 40) == (0, 0)
    scaled = [(event["reason"].split(" at ")[0], event["step"]) for event in folder.read("events.jsonl") if event["event"] == "scaled"]
    assert [what for what, _ in scaled] == ["1 -> 3 targets", "3 -> 1 targets"] and 0 < scaled[0][1] < scaled[1][1]
