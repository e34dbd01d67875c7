"""The report: what it says of a run, that its one file needs nothing else, and that a real browser shows it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dflash_ray.config.loading import validate
from dflash_ray.run.folder import EVENTS, METRICS, TRAINED, VALIDATION, RunFolder
from dflash_ray.run.metric_records import Event
from dflash_ray.watch.report.gather import POINTS, gather
from dflash_ray.watch.report.page import report_html
from jobs.report import main
from tests.support.browser import browser, find_browser

NASTY = "target-1 died: </script><script>document.title = 'broken'</script> & <b>"


def write_run(folder: Path, steps: int = 120, *, bucketed: bool = False, watts: bool = True, ended: bool = True) -> Path:
    """Files of a run as they would be: 1,000 tokens and 36 s per step, a restart after step 40, scaled after step 60."""
    run, rng = RunFolder(folder), np.random.default_rng(0)
    run.create(validate({"run": {"name": folder.name}, "topology": "2-1"}), {"node": "here", "started": 1.8e9})
    metrics, trained = [], []
    for step in range(1, steps + 1):
        loss = 8 / step**0.5 + float(rng.normal(0, 0.05))
        metrics.append(
            {
                "step": step,
                "loss": math.nan if step == 50 else loss,
                "loss_smooth": loss,
                "tau": 1 + step / steps,
                "accuracy": step / (2 * steps),
                "slot_accuracy": [step / steps / (slot + 1) for slot in range(3)],
                "lr": 1e-3,
                "grad_norm": 1.0,
                "real_tokens": 1000,
                "padded_tokens": 1250,
                "real_tokens_per_second": 28.0,
                "padded_tokens_per_second": 35.0,
                "drafter_wait": 0.1,
                "target_wait": 0.0,
                "mean_document_tokens": float(50 + 10 * (step % 4)),
                "buckets": [step % 3] if bucketed else [],
                "q_pre": [1, 1],
                "ahead": 50,
                "q_hs": step % 2,
                "window_bytes": 5_000_000,
                "targets": 2 if step <= 60 else 3,
                "seconds": 36.0,
                **({"watts": 900.0, "tokens_per_joule": 0.03} if watts else {}),
            }
        )
        trained.append({"batch": step - 1, "step": step, "sample_ids": [step], "target": f"target-{step % 2}"})
    run.append(METRICS, *metrics)
    run.append(TRAINED, *trained)
    for step in range(30, steps + 1, 30):
        run.append(VALIDATION, {"step": step, "loss": 5.0, "tau": 1 + step / 100, "accuracy": 0.3, "slot_accuracy": [0.5, 0.3, 0.1]})
    happened = (("target_restart", 40, NASTY), ("scaled", 60, "2 -> 3 targets at step 60"), ("checkpoint", 120, "step 120"))
    run.append(EVENTS, *(Event(event=kind, step=step, time=1.8e9, reason=reason).as_json() for kind, step, reason in happened))
    if ended:
        run.write_json("summary.json", {"finished": True, "topology": "2-1"})
    return folder


def test_a_run_is_told_as_it_was(tmp_path):
    run = gather(write_run(tmp_path / "run"))
    series = run["series"]
    assert series["step"][-1] == 120 and series["tokens"][-1] == 120_000 and series["hours"][-1] == pytest.approx(1.2)
    assert series["loss"][49] is None and None not in series["loss"][:49]
    assert series["q_pre"][0] == 2 and series["window_mb"][0] == 5 and series["watts"][0] == 900
    restart, scaled, checkpoint = run["events"]
    assert (restart["kind"], restart["tokens"], restart["hours"]) == ("restart", 40_000, pytest.approx(0.4))
    assert (scaled["kind"], checkpoint["kind"]) == ("scaling", "checkpoint")
    assert [one["batches"] for one in run["targets"]] == [60, 60]
    assert run["slots"]["late"][0] == pytest.approx(np.mean(np.arange(109, 121) / 120), rel=1e-4)
    numbers = {number["name"]: number for number in run["headline"]}
    assert numbers["best held-out tau"]["value"] == "2.20" and numbers["padding efficiency"]["value"] == "80.0%"
    assert numbers["state"]["value"] == "finished" and numbers["training time"] == {
        "name": "training time",
        "value": "1:12:00",
        "note": "1 restart",
    }
    assert "topology: 2-1" in run["config"]


def test_length_groups_hold_every_step_once(tmp_path):
    by_length, by_bucket = gather(write_run(tmp_path / "packed")), gather(write_run(tmp_path / "bucketed", bucketed=True))
    for run in (by_length, by_bucket):
        assert sum(row["steps"] for row in run["buckets"]) == 120 and sum(row["tokens"] for row in run["buckets"]) == 120_000
    assert [row["name"] for row in by_bucket["buckets"]] == ["bucket 0", "bucket 1", "bucket 2"]
    assert "tokens" in by_length["buckets"][0]["name"]


def test_a_long_run_is_thinned_and_keeps_its_spikes(tmp_path):
    folder = write_run(tmp_path / "run", steps=2 * POINTS + 7)
    lines = (folder / METRICS).read_text().splitlines()
    spike = json.loads(lines[1001]) | {"loss": 77.0}
    lines[1001] = json.dumps(spike)
    (folder / METRICS).write_text("\n".join(lines) + "\n")
    series = gather(folder)["series"]
    assert len(series["step"]) == POINTS and series["step"][-1] == 2 * POINTS + 7
    assert max(series["loss_most"]) == 77.0 > max(series["loss"][100:])


def test_one_file_that_needs_nothing_else(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    assert main(["--run", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert re.findall(r"https?://[^\s\"']+", page) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"<(link|script|img|iframe)[^>]+(src|href)=(?!\"data:)", page)
    assert page.count("</script>") == 2 and "<b>" not in page
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL).group(1)
    assert json.loads(data)[0]["events"][0]["reason"] == NASTY
    assert str(folder / "report.html") in capsys.readouterr().out


def test_runs_of_one_name_are_told_apart_and_a_going_run_is_one(tmp_path):
    page = report_html([write_run(tmp_path / "a" / "run", watts=False, ended=False), write_run(tmp_path / "b" / "run")])
    assert "a/run" in page and "b/run" in page and "not ended" in page


@pytest.mark.parametrize(
    "make, named",
    [
        (lambda folder: folder.mkdir(), "holds no run"),
        (lambda folder: RunFolder(folder).create(validate({}), {}), "no step yet"),
    ],
)
def test_a_folder_without_a_run_is_said(tmp_path, make, named):
    make(tmp_path / "run")
    with pytest.raises(ValueError, match=named):
        main(["--run", str(tmp_path / "run")])
    assert not (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize(
    "key", ["real_tokens", "seconds", "loss", "q_pre", "slot_accuracy", "window_bytes", "step", "mean_document_tokens"]
)
@pytest.mark.parametrize("value", ["x", {}, [[]], 10**400, True])
def test_a_damaged_line_is_named_and_no_traceback(tmp_path, key, value):
    folder = write_run(tmp_path / "run")
    lines = (folder / METRICS).read_text().splitlines()
    lines[5] = json.dumps(json.loads(lines[5]) | {key: value})
    (folder / METRICS).write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=rf"{METRICS}: {key} of record 6 is not"):
        gather(folder)


@pytest.mark.parametrize(
    "name, line", [(METRICS, "{}"), (VALIDATION, "{}"), (EVENTS, '{"step": 1, "event": 5}'), (TRAINED, '{"batch": 0, "target": []}')]
)
def test_a_line_of_something_else_is_named(tmp_path, name, line):
    folder = write_run(tmp_path / "run")
    (folder / name).write_text(line + "\n")
    with pytest.raises(ValueError, match=f"{name}: .* of record 1 is not"):
        gather(folder)
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(ValueError, match=f"{name}: cannot be read"):
        gather(folder)


@pytest.mark.parametrize("name", ["summary.json", "run.json", "config.yaml"])
@pytest.mark.parametrize("data", [b"[]", b"5", b'{"environment": 5}', b"\xff\xfe", b""])
def test_files_beside_the_lines_may_be_anything(tmp_path, name, data):
    folder = write_run(tmp_path / "run")
    (folder / name).write_bytes(data)
    assert gather(folder)["series"]["step"][-1] == 120


def colours(picture: Path) -> np.ndarray:
    """Counts of the colours in a picture, most frequent first."""
    pixels = np.asarray(Image.open(picture).convert("RGB")).reshape(-1, 3).astype(np.int64) @ [65536, 256, 1]
    return np.sort(np.unique(pixels, return_counts=True)[1])[::-1]


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_it(tmp_path, dark):
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium or Chrome is installed: install one (Debian: chromium), or set BROWSER_PATH")
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", steps=80, bucketed=True, watts=False)
    pages = {"one": [one], "both": [one, two]}
    with browser(path, tmp_path / "profile") as window:
        for name, folders in pages.items():
            page = tmp_path / f"{name}.html"
            page.write_text(report_html(folders), encoding="utf-8")
            window.open(page, dark=dark)
            assert window.value("document.title") == ", ".join(folder.name for folder in folders), "text of the run became code"
            drawn = int(window.value("document.body.dataset.drawn"))
            assert drawn >= 13
            assert window.value("[...document.querySelectorAll('.card svg')].every(one => one.querySelector('path.curve, circle'))")
            assert "NaN" not in window.value("document.getElementById('charts').innerHTML")
            found = colours(window.picture(tmp_path / f"{name}.png"))
            assert len(found) > 200 and found[0] < 0.97 * found.sum(), "the picture is nearly blank"

            other = "tokens" if name == "one" else "step"  # than the one shown at first
            before = window.value("document.querySelector('.card svg').textContent")
            window.click(f"#axis [data-axis={other}]")
            assert window.value("document.querySelector('.card svg').textContent") != before
            window.move(*window.middle(".card svg"))
            assert not window.value("document.getElementById('tip').hidden")
            assert window.value("document.getElementById('tip').textContent")
            window.resize(500, 800)
            assert window.value("document.documentElement.scrollWidth") <= 500
            assert window.errors == []
            assert window.requests == [page.resolve().as_uri()]
