"""Watts: read from a file however it is written, added up to joules, and kept under a budget without going to and fro."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflash_ray.config.loading import load_config
from dflash_ray.watch.meter import Meter
from dflash_ray.watch.power import READINGS, PowerCap, read_watts


@pytest.mark.parametrize(
    "text, watts",
    [
        ("0 612.5\n1 598\n", {"0": 612.5, "1": 598.0}),
        ("612.5\n\n598\n", {"0": 612.5, "1": 598.0}),
        ("target-0: 300\ndrafter=400\n", {"target-0": 300.0, "drafter": 400.0}),
        ('{"0": 300, "drafter": 400.5}', {"0": 300.0, "drafter": 400.5}),
        ("[300, 400]", {"0": 300.0, "1": 400.0}),
        ("250", {"0": 250.0}),
    ],
)
def test_a_file_of_watts(tmp_path, text, watts):
    path = tmp_path / "watts"
    path.write_text(text)
    assert read_watts(path) == watts


@pytest.mark.parametrize("text", ["", "\n", "0 much", "-5", "nan", "0 inf", "{}", "[]", '{"0": "3"}', "[true]", "null", '{"0": [1]}'])
def test_a_file_of_something_else(tmp_path, text):
    path = tmp_path / "watts"
    path.write_text(text)
    with pytest.raises(ValueError, match="watts"):
        read_watts(path)


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 400, '{"0": ' + "9" * 400 + "}", "1e300", "0" * 2_000_000])
def test_a_hostile_file_of_watts_is_one_line(tmp_path, text):
    path = tmp_path / "watts"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path}: ") as refusal:
        read_watts(path)
    assert len(str(refusal.value)) < 300 + len(str(path))


@pytest.mark.timeout(60)
def test_a_pipe_that_takes_the_place_of_a_file_of_watts_keeps_nobody_waiting(tmp_path):
    os.mkfifo(tmp_path / "watts")
    for path in (tmp_path / "watts", tmp_path, Path("/dev/zero")):
        with pytest.raises(ValueError, match="is no regular file"):
            read_watts(path)


class Machine:
    """Targets that take `each` watts at work and nothing parked; the rest takes `rest`."""

    def __init__(self, cap, targets, each, rest):
        self.cap, self.targets, self.each, self.rest, self.parked, self.changes = cap, targets, each, rest, 0, []

    def run(self, readings):
        for reading in range(readings):
            watts = self.rest + self.each * (self.targets - self.parked)
            wish = self.cap.decide(watts)
            if wish == "park" and self.parked < self.targets - 1 or wish == "wake" and self.parked:
                self.parked += 1 if wish == "park" else -1
                self.cap.changed(wish)
                self.changes.append((reading, wish))


def test_it_parks_as_many_as_it_must_and_no_more():
    machine = Machine(PowerCap(1500, 0.9), targets=6, each=200, rest=400)
    machine.run(200)
    assert machine.parked == 1 and [wish for _, wish in machine.changes] == ["park"]
    machine.rest = 100  # 5 x 200 + 100 is below 0.9 x 1500
    machine.run(200)
    assert machine.parked == 0


def test_between_the_two_limits_nothing_changes():
    machine = Machine(PowerCap(1500, 0.9), targets=7, each=200, rest=0)
    machine.run(1000)
    assert machine.parked == 0 and not machine.changes


def test_one_reading_decides_nothing():
    cap = PowerCap(1000, 0.9)
    assert [cap.decide(watts) for watts in (900, 900, 5000, 900)] == [None] * 4
    spikes = PowerCap(1000, 0.9)
    assert not any(spikes.decide(watts) for watts in [950] * READINGS + [1100] + [950] * READINGS)


def test_where_no_number_of_targets_fits_the_tries_become_rare():
    """One target more is above the budget, one less below the limit to wake."""
    machine = Machine(PowerCap(1000, 0.9), targets=2, each=400, rest=300)
    machine.run(5000)
    wakes = [reading for reading, wish in machine.changes if wish == "wake"]
    gaps = [b - a for a, b in zip(wakes, wakes[1:], strict=False)]
    assert gaps == sorted(gaps) and gaps[-1] > 500 and len(wakes) < 20


def test_joules_are_watts_times_time_and_tokens_are_divided_by_them():
    meter = Meter(10_000)
    meter.start(0.0)
    meter.power(0.0, 100.0)
    for step in range(1, 5):
        rates = meter.step(10.0 * step, 500, 500)
    assert rates["watts"] == pytest.approx(100) and rates["tokens_per_joule"] == pytest.approx(0.5)
    meter.power(40.0, 300.0)
    assert meter.joules(50.0) == 4000 + 3000 and meter.tokens_per_joule(50.0) == pytest.approx(2000 / 7000)
    silent = Meter(10)
    silent.start(0.0)
    assert [silent.step(time, 5, 5)["watts"] for time in (1.0, 2.0, 3.0)] == [None] * 3 and silent.tokens_per_joule(3.0) is None


def test_settings():
    assert load_config(flags=["--power.source", "file:/a/b"]).power.file.name == "b"
    for flags in (["--power.source", "smi"], ["--power.source", "none", "--power.budget_watts", "5"], ["--power.budget_watts", "0"]):
        with pytest.raises(ValueError, match="power"):
            load_config(flags=flags)
