"""Whatever is killed, the run ends with the weights of an undisturbed one, and every sample was trained once."""

from __future__ import annotations

import shutil
import signal
import socket
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dflash_ray.run.folder import RunFolder
from tests.support.faults import Saboteur, actors, assert_same, losses_of, send
from tests.support.tiny_runs import dense_material, train

STEPS = 30
RUN = {
    "topology": "2-1",
    "train": {"epochs": 6, "batches_per_step": 2},
    "run": {"max_steps": STEPS},
    "checkpoint": {"every_steps": 4},
    # a kill may meet the same batch again and again, which says nothing about the batch
    "flow": {"restarts_per_hour": 1000, "deaths_per_batch": 1000, "deadline_min_seconds": 5.0},
    "debug": {"target_delay_seconds": 1.0},
}


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    return dense_material(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="module")
def undisturbed(local_ray, material, tmp_path_factory) -> RunFolder:
    folder, _, code = train(material, tmp_path_factory.mktemp("runs") / "one", **{**RUN, "topology": "1-1", "debug": {}})
    assert code == 0
    return folder


def sabotaged(material: Path, run: Path, script, **sections) -> RunFolder:
    with Saboteur(script, RunFolder(run)):
        folder, summary, code = train(material, run, **{**RUN, **sections})
    assert code == 0 and summary["steps"] == STEPS
    return folder


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_every_actor_is_killed_once(undisturbed, material, tmp_path):
    def script(s: Saboteur) -> None:
        s.until(lambda: s.steps() >= 1, "the first step")
        s.kill("target", "compute")
        s.until(lambda: s.steps() >= 6, "step 6")
        s.kill("drafter", "train")
        s.until(lambda: s.events("rewound"), "the rewind")
        s.kill("batcher")

    folder = sabotaged(material, tmp_path / "run", script)
    assert_same(folder, undisturbed)
    happened = [event["event"] for event in folder.read("events.jsonl")]
    assert {"target_restart", "drafter_restart", "rewound"} <= set(happened)
    assert "set_aside" not in happened


def idle_and_its_features_unread(s: Saboteur) -> None:
    """The drafter stands still, so the window fills and a target has nothing to do; then all of them die, their features unread."""
    drafter = s.stop("drafter")
    s.until(lambda: actors(s.root, "target", ""), "an idle target")
    for pid in actors(s.root, "target"):
        send(pid, signal.SIGKILL)
    send(drafter, signal.SIGCONT)


def in_the_middle_of_a_batch(s: Saboteur) -> None:
    s.kill("target", "compute")


def while_it_restarts(s: Saboteur) -> None:
    first = s.kill("target", "compute")
    s.until(lambda: s.events("target_restart"), "the restart")
    s.until(lambda: [pid for pid in actors(s.root, "target", "__init__") if pid != first], "a target that loads")
    s.kill("target", "__init__")


def twice_in_a_row(s: Saboteur) -> None:
    s.kill("target", "compute")
    s.kill("target", "compute")


def all_at_once(s: Saboteur) -> None:
    for pid in s.seen("target"):
        send(pid, signal.SIGKILL)


def drafter_in_optimizer_step(s: Saboteur) -> None:
    s.kill("drafter", "step")


def drafter_while_it_writes(s: Saboteur) -> None:
    s.until(lambda: list(s.folder.checkpoints.glob(".writing-*")), "a checkpoint being written")
    send(actors(s.root, "drafter")[0], signal.SIGKILL)


def drafter_twice(s: Saboteur) -> None:
    first = s.kill("drafter", "train")
    s.until(lambda: [pid for pid in actors(s.root, "drafter") if pid != first], "its successor")
    s.kill("drafter")


def everything_but_the_coordinator(s: Saboteur) -> None:
    for role in ("target", "drafter", "batcher"):
        for pid in actors(s.root, role):
            send(pid, signal.SIGKILL)


PHASES = {
    "targets": [in_the_middle_of_a_batch, idle_and_its_features_unread, while_it_restarts, twice_in_a_row, all_at_once],
    "drafter": [drafter_in_optimizer_step, drafter_while_it_writes, drafter_twice, everything_but_the_coordinator],
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("group", PHASES)
def test_kills_in_named_phases(undisturbed, material, tmp_path, group):
    def script(s: Saboteur) -> None:
        for phase in PHASES[group]:
            before = s.steps()
            s.until(lambda before=before: not before <= s.steps() < before + 2, f"two steps before {phase.__name__}")
            phase(s)

    assert_same(sabotaged(material, tmp_path / "run", script), undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_process_that_hangs_is_replaced(undisturbed, material, tmp_path):
    def script(s: Saboteur) -> None:
        s.until(lambda: s.steps() >= 5, "five steps")  # enough to have measured what is usual
        for role, method in (("target", "compute"), ("batcher", None), ("drafter", "train")):
            pid = s.stop(role, method)
            s.until(lambda role=role: s.events(f"{role}_restart"), f"the {role} to be missed")
            s.gone(pid)

    folder = sabotaged(material, tmp_path / "run", script, flow={**RUN["flow"], "prefetch_batches": 4})
    assert_same(folder, undisturbed)
    for role in ("target", "batcher", "drafter"):
        reason = next(event["reason"] for event in folder.read("events.jsonl") if event["event"] == f"{role}_restart")
        assert "gave no answer" in reason and "within" in reason and "host memory" in reason


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_target_whose_restarts_are_used_up_is_missed_and_the_last_one_ends_the_run(material, local_ray, tmp_path, capsys):
    def script(s: Saboteur) -> None:
        s.until(lambda: s.steps() >= 1, "a step")
        s.kill("target", "compute")
        s.until(lambda: s.events("target_given_up"), "one less")
        before = s.steps()
        s.until(lambda: s.steps() >= before + 3, "the run to go on with the other one")
        s.kill("target", "compute")

    run = tmp_path / "run"
    with Saboteur(script, RunFolder(run)):
        _, report, code = train(material, run, **{**RUN, "flow": {"restarts_per_hour": 0}})
    assert code == 1 and "no target is left" in report["failed"]
    assert "no target is left" in capsys.readouterr().err


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_weights_that_change_during_a_run_are_taken_up_by_nobody(undisturbed, material, tmp_path):
    """Whoever has loaded them goes on; whoever starts again is refused, and without a drafter the run says why it ends."""
    target = tmp_path / "target"
    shutil.copytree(material / "target", target)
    refusal = f"target.path: {target} on {socket.gethostname()} does not hold the weights that this run began with"

    def script(s: Saboteur) -> None:
        s.seen("target", "compute", count=2)
        weights = load_file(target / "model.safetensors")
        weights["model.layers.0.mlp.up_proj.weight"] *= 1.5
        save_file(weights, target / "new", metadata={"format": "pt"})
        (target / "new").rename(target / "model.safetensors")
        s.kill("target", "compute")
        s.until(lambda: any(refusal in event["reason"] for event in s.events("target_restart")), "a refused target")
        at = s.steps()
        s.until(lambda: s.steps() >= at + 2, "steps with the target that is left")
        s.kill("drafter")

    with Saboteur(script, RunFolder(tmp_path / "run")):
        sections = {**RUN, "flow": {**RUN["flow"], "restarts_per_hour": 3}}
        folder, summary, code = train(material, tmp_path / "run", target={"path": str(target)}, **sections)
    assert code == 1 and summary["failed"].startswith(refusal)
    losses = losses_of(folder)
    assert len(losses) >= 2 and losses == losses_of(undisturbed)[: len(losses)]
