"""What `--help` shows can be copied."""

from __future__ import annotations

import os
import subprocess
import sys

from dflash_ray.config.loading import describe_settings
from tests.support.processes import ROOT


def test_no_setting_is_cut_off_on_a_narrow_terminal():
    run = subprocess.run(
        [sys.executable, "-m", "jobs.train", "--help"], cwd=ROOT, env=os.environ | {"COLUMNS": "60"}, capture_output=True, text=True
    )
    shown = {line.split()[0] for line in run.stdout.splitlines() if line.startswith("--")}
    assert run.returncode == 0 and shown >= {f"--{name}" for name, _, _ in describe_settings()}
    assert "…" not in run.stdout
