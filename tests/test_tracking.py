"""Tracking never stops a run: offline without a key, quiet about a service that refuses, never waiting for one that hangs."""

from __future__ import annotations

from pathlib import Path

from dflash_ray.config import load_config
from dflash_ray.tracking import Tracker


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
