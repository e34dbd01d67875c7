"""Tracking never stops a run: offline without a key, quiet about a service that refuses, never waiting for one that hangs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from dflash_ray.config.loading import load_config
from dflash_ray.watch.tracking import QUEUE, Tracker
from tests.support.processes import family


@pytest.fixture(scope="module", autouse=True)
def no_service_is_left():
    """W&B's service process outlives the runs of the process that started it, and waits a minute and a half for a server that hangs."""
    before = family(os.getpid())
    yield
    for pid in set(family(os.getpid())) - set(before):
        os.kill(pid, signal.SIGKILL)


def tracked(folder: Path, records: int, monkeypatch, **env: str) -> list[str]:
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(folder))
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    tracker = Tracker(load_config(flags=["--tracking.kind", "wandb"]), folder, said.append)
    for step in range(1, records + 1):
        tracker.log("train", {"step": step, "loss": 1.0 / step, "q_pre": [1, 1]})
    tracker.close()
    return said


def test_without_a_key_the_run_is_kept_offline(tmp_path, monkeypatch):
    said = tracked(tmp_path, 3, monkeypatch)
    assert len(said) == 1 and "offline" in said[0]
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    assert any(path.stat().st_size > 0 for path in run.glob("*.wandb"))


def test_a_key_that_is_none_ends_the_tracking_and_says_so(tmp_path, monkeypatch):
    said = tracked(tmp_path, 3, monkeypatch, WANDB_API_KEY="too-short", WANDB_BASE_URL="http://127.0.0.1:9")
    assert len(said) == 1 and "training goes on without it" in said[0]


def test_none_tracks_nothing(tmp_path):
    tracker = Tracker(load_config(), tmp_path, lambda _: None)
    tracker.log("train", {"step": 1})
    tracker.close()
    assert not list(tmp_path.iterdir())


def test_tensorboard_files_hold_every_number(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    said: list[str] = []
    tracker = Tracker(load_config(flags=["--tracking.kind", "tensorboard"]), tmp_path, said.append)
    for step in range(1, 6):
        tracker.log("train", {"step": step, "loss": 1.0 / step, "q_pre": [1, 1], "watts": None})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss"] and not said
    assert [(event.step, round(event.value, 4)) for event in events.Scalars("train/loss")] == [(n, round(1 / n, 4)) for n in range(1, 6)]


def test_a_service_that_hangs_is_told_once_and_holds_up_nobody(tmp_path, monkeypatch):
    """The server takes the connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        said = tracked(tmp_path, 2 * QUEUE, monkeypatch, WANDB_API_KEY="a" * 40, WANDB_BASE_URL=address)
    assert len(said) == 1 and "takes no more records" in said[0]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB, where the machine allows one."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no small disk can be made here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own thread dies of it
@pytest.mark.parametrize("kind", ["wandb", "tensorboard"])
def test_a_full_disk_is_told_and_holds_up_nobody(small_disk, tmp_path, monkeypatch, kind):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with (small_disk / "ballast").open("wb") as file:
        try:
            file.write(bytes(4 * 2**20))
            file.flush()
        except OSError:
            pass
    said: list[str] = []
    tracker = Tracker(load_config(flags=["--tracking.kind", kind]), small_disk, said.append)
    for step in range(1, 50):
        tracker.log("train", {"step": step, "loss": 1.0 / step})
    tracker.close()
    assert "training goes on" in said[-1] and kind in said[-1]
