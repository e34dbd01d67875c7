"""The files of a run: cut back exactly, whole lines or none, and one writer."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from dflash_ray.run.folder import RunFolder
from dflash_ray.run.metric_records import Event
from jobs.support.run_driver import _clear
from tests.support.processes import ROOT


@contextmanager
def files_up_to(nbytes: int):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_rewind_keeps_what_is_in_the_weights(tmp_path):
    run = RunFolder(tmp_path)
    for step in range(1, 6):
        run.append("trained.jsonl", *({"batch": batch, "step": step} for batch in (2 * step - 2, 2 * step - 1)))
        run.append("metrics.jsonl", {"step": step, "loss": 1 / step})
        event = Event(event="checkpoint", step=step, time=1.8e9, reason="because", details={"kind": "anything", "reasons": []})
        run.append("events.jsonl", event.as_json())
    run.append("validation.jsonl", {"step": 3}, {"step": 5})
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "torn')
    run.rewind(3, 6)
    assert [record["batch"] for record in run.read("trained.jsonl")] == list(range(6))
    assert [record["step"] for record in run.read("metrics.jsonl")] == [1, 2, 3]
    assert [record["step"] for record in run.read("validation.jsonl")] == [3]
    run.append("events.jsonl", {"event": "resumed", "step": 3, "time": 1.8e9, "reason": "after a torn line"})
    assert len(run.read("events.jsonl")) == 6


def test_what_a_full_disk_does_not_take_waits_and_comes_in_order(tmp_path):
    run = RunFolder(tmp_path)
    for step in range(1, 60):
        run.append("metrics.jsonl", {"step": step, "loss": 0.5})
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    with files_up_to(len(whole) + 10):  # a part of the next line would fit
        for step in range(60, 70):
            run.append("metrics.jsonl", {"step": step, "loss": 0.5})
            assert run.trouble
        assert (tmp_path / "metrics.jsonl").read_bytes() == whole
        with pytest.raises(OSError):
            run.sync()
        run.rewind(64, 128)
    run.append("metrics.jsonl", {"step": 65, "loss": 0.5})
    assert run.trouble is None
    assert [record["step"] for record in run.read("metrics.jsonl")] == list(range(1, 66))


@pytest.mark.parametrize("line", [b"{", b"[1]", b"nonsense", b"\xff\xfe", b'{"loss": 1}'])
def test_a_damaged_line_is_named(tmp_path, line):
    run = RunFolder(tmp_path)
    run.append("metrics.jsonl", {"step": 1}, {"step": 2})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl: .*damaged"):
        run.rewind(1, 2)


def test_one_process_at_a_time(tmp_path):
    program = (
        "import sys; from dflash_ray.run.folder import RunFolder; run = RunFolder(sys.argv[1]); print(run.lock(), flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline().strip() == "True"
        assert not RunFolder(tmp_path).lock()
        with pytest.raises(ValueError, match="--fresh: another run writes"):
            _clear(RunFolder(tmp_path), patience=0)
        threading.Timer(2.0, other.kill).start()
        _clear(RunFolder(tmp_path))  # waits for one that is about to end
        assert other.wait(timeout=30) == -signal.SIGKILL
    finally:
        other.kill()
        other.wait(timeout=30)
    assert RunFolder(tmp_path).lock()


def test_starting_over_removes_what_a_run_wrote_and_nothing_else(tmp_path):
    run, outside = RunFolder(tmp_path / "run"), tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    run.path.mkdir()
    (run.path / "mine.txt").touch()
    run.append("metrics.jsonl", {"step": 1})
    os.symlink(outside, run.checkpoints)  # as a hostile run folder might come
    run.clear()
    assert sorted(path.name for path in run.path.iterdir()) == ["mine.txt"] and (outside / "kept").exists()
