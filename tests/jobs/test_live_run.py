"""What `jobs.status` and `jobs.scale` answer when there is no running run: one line, exit code 2."""

from __future__ import annotations

import json
import os
import socket
import sys

import pytest

from jobs import scale, status
from jobs.support import cli
from tests.support.processes import free_ports


def refused(main, argv, capsys, monkeypatch) -> str:
    monkeypatch.setattr(sys, "argv", ["job", *argv])
    with pytest.raises(SystemExit) as exit_:
        cli.run(main)
    said = capsys.readouterr()
    assert exit_.value.code == 2 and said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1, said
    return said.err


def run_folder(folder, **changed):
    facts = {"ray_address": f"127.0.0.1:{free_ports(1)[0]}", "namespace": "n", "coordinator": "coordinator", "pid": os.getpid()}
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(facts | {"node": socket.gethostname(), "started": 0} | changed))
    return folder


@pytest.fixture(params=[status, scale], ids=["status", "scale"])
def ask(request, capsys, monkeypatch):
    more = ["--targets", "2"] if request.param is scale else []
    return lambda *argv: refused(request.param.main, [*more, *argv], capsys, monkeypatch)


def test_no_run(ask, tmp_path, monkeypatch):
    assert "holds no run" in ask("--run", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "no run in" in ask()


@pytest.mark.parametrize("content", ["", "[]", "{}", "null", '{"ray_address": 7}', '{"ray_address": "here"}', "\x00"])
def test_a_broken_run_file(ask, tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    assert "run.json cannot be read" in ask("--run", str(tmp_path))


def test_ray_that_is_not_there(ask, tmp_path):
    assert "cannot be reached" in ask("--run", str(run_folder(tmp_path / "run")))
    dead = run_folder(tmp_path / "dead", pid=2**22 + 1)
    assert "has ended without a summary; continue it with --resume auto" in ask("--run", str(dead))


def test_a_run_that_has_ended(ask, tmp_path):
    run = run_folder(tmp_path / "run")
    (run / "summary.json").write_text(json.dumps({"finished": True, "steps": 1234}))
    assert "has ended: finished after 1,234 steps" in ask("--run", str(run))
    (run / "summary.json").write_text(json.dumps({"failed": "no target is left"}))
    assert "has failed: no target is left" in ask("--run", str(run))


def test_the_newest_run_is_meant(tmp_path, monkeypatch, ask):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "runs").mkdir()
    for number, name in enumerate(("old", "new")):
        run = run_folder(tmp_path / "runs" / name)
        (run / "summary.json").write_text("{}")
        os.utime(run / "run.json", (number + 1, number + 1))
    assert "runs/new" in ask()


def test_flags(ask):
    assert "--help" in ask("--what")
