"""Run folders and checkpoints that earlier versions wrote are read, and continued exactly.

`fixtures/run-of-56a0308.tar.xz` was made by the code of commit 56a0308, before records had versions: a tiny target and data set, a run
stopped after step 10 of 23 with one batch set aside, and the metrics of the same run to its end.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from dflash_ray.config.loading import merge, validate
from dflash_ray.config.schema import Config
from dflash_ray.planning.stage_rates import of_run
from dflash_ray.run.build import open_batches
from dflash_ray.run.checkpoint import RunIdentity, newest_whole
from dflash_ray.run.checks import check_identity
from dflash_ray.run.exports import HELD_OUT, card_of_run, choose_checkpoint, run_config
from dflash_ray.run.folder import RunFolder
from dflash_ray.run.metric_records import read_events, read_steps, read_trained, read_validations
from dflash_ray.run.place import run_place
from dflash_ray.run.spec import resolve, with_weights
from dflash_ray.watch.report.gather import gather

PACKED = Path(__file__).parent / "fixtures" / "run-of-56a0308.tar.xz"


@pytest.fixture
def older(tmp_path) -> Path:
    with tarfile.open(PACKED) as packed:
        packed.extractall(tmp_path, filter="data")
    return tmp_path


def config_of(older: Path, **sections) -> Config:
    """The older run's own config, its paths where the files lie now."""
    here = {"run": {"dir": str(older / "run")}, "target": {"path": str(older / "material/target")}}
    here |= {"data": {"path": str(older / "material/data")}}
    return validate(merge(merge(run_config(older / "run").as_dict(), here), sections))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_file_of_it_is_read(older):
    run = RunFolder(older / "run")
    steps, trained, events = read_steps(run, "step", "loss"), read_trained(run), read_events(run)
    assert [record.step for record in steps] == list(range(1, 11)) and steps[-1].spike is None and steps[0].kl is None
    assert [record.values() for record in steps] == lines(run.path / "metrics.jsonl")
    assert [record.values() for record in trained] == lines(run.path / "trained.jsonl")
    assert [record.values() for record in events] == lines(run.path / "events.jsonl")
    assert [record.step for record in read_validations(run, "tau")] == [5, 10]
    assert run_place(run.path).info.coordinator == "coordinator" and run_place(run.path).summary["steps"] == 10
    assert gather(run.path)["targets"] and of_run(run.path).target > 0


def test_its_checkpoint_is_that_of_the_same_run(older):
    checkpoint, refused = newest_whole(older / "run" / "checkpoints")
    assert (checkpoint.step, checkpoint.next_batch, refused) == (10, 20, [])
    assert [entry["batch"] for entry in checkpoint.meta.set_aside] == [4] and checkpoint.meta.best_by == "tau"
    spec = with_weights(resolve(config_of(older), device="cpu", run_dir=older / "run"))
    plan = open_batches(spec).info
    mine = RunIdentity(plan.plan, plan.dataset, spec.weights, 2, 0)
    check_identity(spec, checkpoint, mine, 23)
    with pytest.raises(ValueError, match="--resume: the checkpoint's seed is 0, this run's is 1"):
        check_identity(spec, checkpoint, RunIdentity(plan.plan, plan.dataset, spec.weights, 2, 1), 23)
    recipe, tau = card_of_run(older / "run", config_of(older), choose_checkpoint(older / "run"))
    assert recipe["steps"] == "10 of 23" and HELD_OUT in tau


@pytest.mark.ray
def test_it_is_continued(local_ray, older):
    from jobs.support.run_driver import drive, prepare

    summary, code = drive(prepare(config_of(older, run={"resume": "auto", "max_steps": None})))
    assert code == 0 and summary["finished"] and [entry["batch"] for entry in summary["set_aside"]] == [4]
    run = RunFolder(older / "run")
    steps, undisturbed = read_steps(run, "loss"), lines(older / "all-metrics.jsonl")
    assert [record.step for record in steps] == [line["step"] for line in undisturbed]
    # written on another processor, so equal but for rounding; on one machine the bits are compared elsewhere
    assert [record.loss for record in steps] == pytest.approx([line["loss"] for line in undisturbed], rel=1e-4)
    assert [record.loss_smooth for record in steps] == pytest.approx([line["loss_smooth"] for line in undisturbed], rel=1e-4)
    assert [record.tau for record in read_validations(run)] == pytest.approx(
        [line["tau"] for line in lines(older / "all-validation.jsonl")], rel=0.05
    )
    assert [json.loads(line).get("version") for line in (run.path / "metrics.jsonl").read_text().splitlines()] == [None] * 10 + [1] * 13
