"""A short run of random faults; `python -m tests.chaos` runs longer ones."""

from __future__ import annotations

import pytest
from rich.console import Console

from tests.chaos import chaos


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_random_faults_for_two_minutes(tmp_path):
    report = chaos(tmp_path, minutes=2, seed=0)
    report.show(Console())
    assert report.passed, report.trouble or "other weights, or samples lost or repeated"
    assert sum(report.faults.values()) >= 1  # how many depends on the machine's speed
