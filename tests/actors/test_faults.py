"""Poison, deviants, slow peers, a full disk, lost nodes, a dead coordinator, and memory over a long run."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from dflash_ray.run.checkpoint import list_checkpoints, newest_whole
from dflash_ray.run.folder import RunFolder
from tests.support.faults import Saboteur, account, actors, assert_same, losses_of, send, state_of
from tests.support.processes import PATIENCE, alive, end, family, head_node, node, start_job, wait_until
from tests.support.tiny_runs import dense_material, tiny_config, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 30
RUN = {
    "topology": "2-1",
    "train": {"epochs": 6, "batches_per_step": 2},
    "run": {"max_steps": STEPS},
    "checkpoint": {"every_steps": 4},
    "flow": {"restarts_per_hour": 1000},
}


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    return dense_material(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="module")
def undisturbed(local_ray, material, tmp_path_factory) -> RunFolder:
    folder, _, code = train(material, tmp_path_factory.mktemp("runs") / "one", **{**RUN, "topology": "1-1"})
    assert code == 0
    return folder


def events(folder: RunFolder, kind: str) -> list[dict]:
    return [event for event in folder.read("events.jsonl") if event["event"] == kind]


def write_config(material: Path, run: Path, **sections) -> Path:
    path = run.parent / f"{run.name}.yaml"
    path.write_text(yaml.safe_dump(tiny_config(material, run, **{**RUN, **sections})))
    return path


def test_a_batch_that_nobody_can_compute_is_set_aside_the_same_way_everywhere(local_ray, material, tmp_path):
    """Whether it kills its target or gives features that are not finite, and whatever is rewound afterwards."""

    def kill_the_drafter(s: Saboteur) -> None:
        s.until(lambda: s.events("set_aside"), "the poison to be found")
        s.kill("drafter", "train")

    folders = []
    for name, debug, topology in (("deadly", "deadly_batches", "2-1"), ("bad", "bad_batches", "1-1")):
        run = tmp_path / name
        sections = {**RUN, "topology": topology, "debug": {debug: [13]}}
        if name == "bad":
            with Saboteur(kill_the_drafter, RunFolder(run)):
                folder, summary, code = train(material, run, **sections)
        else:
            folder, summary, code = train(material, run, **sections)
        assert code == 0 and [entry["batch"] for entry in summary["set_aside"]] == [13]
        assert account(folder, 40) == (0, 0)
        assert 13 not in [record["batch"] for record in folder.read("trained.jsonl")]
        (event,) = events(folder, "set_aside")
        assert event["batch"] == 13 and event["sample_ids"] and "failed 3 times" in event["reason"]
        folders.append(folder)
    assert state_of(folders[0]) == state_of(folders[1]) and losses_of(folders[0]) == losses_of(folders[1])


def test_a_setup_that_fails_for_every_batch_stops_the_run(local_ray, material, tmp_path):
    folder, report, code = train(material, tmp_path / "run", **{**RUN, "debug": {"bad_batches": list(range(200))}})
    assert code == 1 and "in a row" in report["failed"] and "NaN or infinity" in report["failed"]
    assert not folder.read("trained.jsonl")


def test_a_step_that_is_not_finite_is_skipped_and_many_in_a_row_stop_the_run(local_ray, material, tmp_path):
    sections = {**RUN, "optimizer": {"lr": 1e30}, "schedule": {"warmup": 0.0}, "train": {**RUN["train"], "max_skipped_steps": 4}}
    folder, report, code = train(material, tmp_path / "run", **sections)
    assert code == 1 and "4 steps in a row were skipped" in report["failed"] and "non_finite" in report["failed"]
    skipped = events(folder, "step_skipped")
    assert len(skipped) == 4 and all(event["sample_ids"] for event in skipped)


def test_a_target_that_computes_something_else_is_taken_out_of_service(local_ray, material, tmp_path):
    debug = {"deviant_target": "target-1", "target_delay_seconds": 1.0}
    sections = {**RUN, "topology": "3-1", "flow": {**RUN["flow"], "cross_check_every": 1}, "debug": debug}
    folder, _, code = train(material, tmp_path / "run", **sections)
    assert code == 0
    (event,) = events(folder, "target_out_of_service")
    assert event["actor"] == "target-1" and "differ by" in event["reason"]
    assert account(folder, 40) == (0, 0)


def test_targets_that_agree_stay_and_a_cross_check_changes_nothing(undisturbed, material, tmp_path):
    folder, _, code = train(material, tmp_path / "run", **{**RUN, "flow": {**RUN["flow"], "cross_check_every": 3}})
    assert code == 0 and not events(folder, "targets_disagree") and not events(folder, "target_restart")
    assert_same(folder, undisturbed)


def test_slow_peers_lose_nothing_and_bounds_hold(undisturbed, material, tmp_path):
    """Random delays, one target ten times slower, a drafter that stalls again and again."""

    def stall(s: Saboteur) -> None:
        for step in (5, 12, 19):
            s.until(lambda step=step: s.steps() >= step, f"step {step}")
            pid = s.stop("drafter")
            s.until(lambda: len(actors(s.root, "target", "")) == 3, "all targets to wait for credit")
            send(pid, signal.SIGCONT)

    run = tmp_path / "run"
    debug = {"target_delay_seconds": 0.1, "target_delays": {"target-0": 1.0}}
    with Saboteur(stall, RunFolder(run)):
        folder, _, code = train(material, run, **{**RUN, "topology": "3-1", "debug": debug})
    assert code == 0
    assert_same(folder, undisturbed)
    for record in folder.read("metrics.jsonl"):
        assert record["ahead"] <= 50 and record["q_hs"] <= 8 and max(record["q_pre"]) <= 1
    by_slow = sum(record["target"] == "target-0" for record in folder.read("trained.jsonl"))
    assert by_slow < 2 * STEPS / 3, "the slow one must not hold up the line"


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], check=False).returncode:
        pytest.skip("a file system of a few megabytes cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                pass
    return filler


def test_a_full_disk_stops_neither_training_nor_what_was_saved(undisturbed, material, tmp_path):
    disk = tmp_path / "disk"
    with small_disk(disk, "8m"):
        run, log = disk / "run", tmp_path / "log"
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(tiny_config(material, run, **{**RUN, "debug": {"target_delay_seconds": 0.3}})))
        folder = RunFolder(run)
        job = start_job("jobs.train", "--config", str(path), log=log)
        try:
            wait_until(lambda: b"checkpoint: step 4" in log.read_bytes() or job.poll() is not None, "a checkpoint")
            filler = fill(disk)
            wait_until(lambda: b"checkpoint_failed" in log.read_bytes() or job.poll() is not None, "a checkpoint that does not fit")
            told = (b"cannot write", b"lines wait in memory")
            wait_until(lambda: all(text in log.read_bytes() for text in told) or job.poll() is not None, "the lines that wait")
            assert newest_whole(folder.checkpoints)[0] is not None
            filler.unlink()
            wait_until(lambda: log.read_bytes().count(b"checkpoint: step") > 1 or job.poll() is not None, "the next checkpoint")
            assert job.poll() is None, log.read_text()
            steps = [record["step"] for record in folder.read("metrics.jsonl")]
            assert steps == list(range(1, len(steps) + 1)), "lines written late are all there, in order"
            filler = fill(disk)
            assert job.wait(timeout=PATIENCE) == 1, log.read_text()
            assert "the checkpoint of step 30 could not be written" in log.read_text()
            assert "Traceback" not in log.read_text()
        finally:
            end(job)
        good, refused = newest_whole(folder.checkpoints)
        assert good is not None and not refused
        filler.unlink()
        again = start_job("jobs.train", "--config", str(path), "--resume", "auto", log=log)
        try:
            assert again.wait(timeout=PATIENCE) == 0, log.read_text()
        finally:
            end(again)
        assert_same(folder, undisturbed)


def test_a_dead_coordinator_leaves_no_orphan_and_the_run_continues(undisturbed, material, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    config = write_config(material, run, debug={"target_delay_seconds": 0.2})
    job = start_job("jobs.train", "--config", str(config), log=log)
    try:
        wait_until(lambda: len(list_checkpoints(run / "checkpoints")) >= 2 or job.poll() is not None, "two checkpoints")
        pids = family(job.pid)
        send(actors(job.pid, "coordinator")[0], signal.SIGKILL)
        assert job.wait(timeout=PATIENCE) == 1, log.read_text()
        assert "the coordinator died" in log.read_text() and "--resume auto" in log.read_text() and "Traceback" not in log.read_text()
        wait_until(lambda: not alive(pids), "the actors to end", limit=30)
    finally:
        end(job)
    again = start_job("jobs.train", "--config", str(config), "--resume", "auto", log=log)
    try:
        assert again.wait(timeout=PATIENCE) == 0, log.read_text()
    finally:
        end(again)
    assert_same(RunFolder(run), undisturbed)


def test_a_lost_node_is_done_without_and_taken_back(undisturbed, material, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    sections = {"topology": "3-1", "placement": {"target_resources": {"room": 1}}, "debug": {"target_delay_seconds": 4.0}}
    config = write_config(material, run, **sections)
    folder = RunFolder(run)

    def working() -> int:
        return folder.read("metrics.jsonl")[-1]["targets"]

    def with_room(job: subprocess.Popen, targets: int, what: str) -> None:
        wait_until(lambda: (folder.read("metrics.jsonl") and working() == targets) or job.poll() is not None, what)
        assert job.poll() is None, log.read_text()

    with head_node(tmp_path / "head", resources='{"room": 1}') as head:
        with node(head, tmp_path, room=2) as second:
            job = start_job("jobs.train", "--config", str(config), log=log, RAY_ADDRESS=head["gcs"])
            try:
                with_room(job, 3, "targets on both nodes")
                end(second)
                with_room(job, 1, "the run to go on with one target")
            except BaseException:
                end(job)
                raise
        with node(head, tmp_path, room=2):
            try:
                with_room(job, 3, "the node to be taken back")
                assert job.wait(timeout=PATIENCE) == 0, log.read_text()
            finally:
                end(job)
    assert_same(folder, undisturbed)
    assert len(events(folder, "target_restart")) >= 2


def test_memory_stays_flat_over_two_thousand_batches(local_ray, material, tmp_path):
    """Resident memory of every process, bytes in flight and use of the store at a quarter and at the end; nothing is spilled."""
    from ray._private.worker import _global_node

    seen: list[dict] = []

    def resident(pid: int) -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096

    def look(s: Saboteur) -> None:
        for batches in (500, 1000, 1500, 1980):
            s.until(lambda batches=batches: 10 * s.steps() >= batches, f"{batches} batches", limit=900)
            sizes = {role: resident(actors(s.root, role)[0]) for role in ("target", "drafter", "batcher", "coordinator")}
            free, whole = local_ray.available_resources(), local_ray.cluster_resources()
            seen.append({**sizes, "store": whole["object_store_memory"] - free["object_store_memory"]})

    run = tmp_path / "run"
    sections = {"train": {"epochs": 200, "batches_per_step": 10}, "run": {"max_steps": 200}, "validation": {"batches": 0}}
    with Saboteur(look, RunFolder(run)):
        folder, _, code = train(material, run, **sections, checkpoint={"every_steps": 20})
    assert code == 0 and len(folder.read("trained.jsonl")) == 2000 and len(seen) == 4
    for role in ("target", "drafter", "batcher", "coordinator"):
        grown = (seen[-1][role] - seen[0][role]) / 2**20
        assert grown < 24, f"{role} grew by {grown:.0f} MiB in 1,500 batches: {seen}"
    limit = 0.7 * 512 * 2**20
    assert all(record["window_bytes"] <= limit for record in folder.read("metrics.jsonl"))
    assert max(record["store"] for record in seen) <= limit
    assert not list(Path(_global_node.get_session_dir_path()).glob("**/ray_spilled_objects*/*"))


@pytest.mark.parametrize("setting, value", [("window", 100_000), ("window_bytes", 10**12)])
def test_a_store_too_small_for_the_window_is_refused_with_the_arithmetic(local_ray, material, tmp_path, setting, value):
    with pytest.raises(ValueError, match=rf"flow\.{setting}: .* MB") as error:
        train(material, tmp_path / "run", flow={setting: value})
    assert "/dev/shm" in str(error.value) and not (tmp_path / "run").exists()
