"""A whole run through Ray actors: the same loss sequence whatever the topology, the timing, a stop or a death."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from dflash_ray.config.loading import validate
from dflash_ray.data.store.writer import DatasetWriter
from dflash_ray.run.checkpoint import BestCheckpoint, list_checkpoints, read_checkpoint
from dflash_ray.run.exports import HELD_OUT, REPLAYED, card_of_run, choose_checkpoint, run_config
from dflash_ray.run.folder import RunFolder
from tests.support.tiny_runs import MASK_TOKEN, tiny_config
from tests.support.tiny_targets import VOCAB

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("material")


def train(material: Path, folder: Path, /, **sections) -> tuple[RunFolder, dict, int]:
    from jobs.support.run_driver import drive, prepare

    config = validate(tiny_config(material, folder, **sections))
    summary, code = drive(prepare(config))
    return RunFolder(folder), summary, code


def losses(folder: RunFolder) -> list[tuple[int, str]]:
    """Exact values: a float's hex has every bit."""
    return [(record["step"], float(record["loss"]).hex()) for record in folder.read("metrics.jsonl")]


def state(folder: RunFolder) -> dict[str, bytes]:
    checkpoint = read_checkpoint(list_checkpoints(folder.checkpoints)[-1])
    return {name: tensor.numpy().tobytes() for name, tensor in checkpoint.tensors().items()}


THIRTY = {"train": {"epochs": 6, "batches_per_step": 2}, "run": {"max_steps": 30}}


@pytest.fixture(scope="module")
def undisturbed(local_ray, material, tmp_path_factory) -> RunFolder:
    folder, summary, code = train(material, tmp_path_factory.mktemp("runs") / "one", **THIRTY)
    assert code == 0 and summary["steps"] == 30
    return folder


def assert_every_sample_once(folder: RunFolder, steps: int = 30) -> None:
    trained = folder.read("trained.jsonl")
    assert [record["batch"] for record in trained] == list(range(2 * steps))
    seen = [sample for record in trained for sample in record["sample_ids"]]
    for epoch in range(len(seen) // 40):
        assert sorted(seen[epoch * 40 : (epoch + 1) * 40]) == list(range(40)), f"epoch {epoch}"


@pytest.mark.parametrize("topology", [pytest.param("2-1", marks=pytest.mark.slow), "3-1"])
def test_topology_and_timing_do_not_change_the_maths(undisturbed, material, tmp_path, topology):
    folder, _, code = train(material, tmp_path / "run", topology=topology, debug={"target_delay_seconds": 0.2}, **THIRTY)
    assert code == 0
    assert losses(folder) == losses(undisturbed)
    assert state(folder) == state(undisturbed)
    assert_every_sample_once(folder)
    trained = folder.read("trained.jsonl")
    # a target that loads longer than the others may come too late for some of a short run, so not each of them must have taken part
    assert len({record["target"] for record in trained}) > 1
    arrivals = [record["arrival"] for record in trained]
    assert arrivals != sorted(arrivals), "the delays were meant to let later batches finish before earlier ones"


def test_stop_and_resume_continue_the_same_run(undisturbed, material, tmp_path):
    run = tmp_path / "run"
    first = {**THIRTY, "run": {"max_steps": 15}}
    folder, summary, code = train(material, run, **first)
    assert (code, summary["steps"]) == (0, 15)
    with pytest.raises(ValueError, match="holds a run already"):
        train(material, run, **THIRTY)
    again = {**THIRTY, "run": {"max_steps": 30, "resume": "auto"}}
    folder, summary, code = train(material, run, **again)
    assert (code, summary["steps"]) == (0, 30)
    assert losses(folder) == losses(undisturbed)
    assert [r["lr"] for r in folder.read("metrics.jsonl")] == [r["lr"] for r in undisturbed.read("metrics.jsonl")]
    assert state(folder) == state(undisturbed)
    assert_every_sample_once(folder)
    steps = [record["step"] for record in folder.read("validation.jsonl")]
    assert steps == [record["step"] for record in undisturbed.read("validation.jsonl")] == [10, 20, 30]


def test_validation_does_not_change_training(undisturbed, material, tmp_path):
    folder, _, _ = train(material, tmp_path / "run", **THIRTY, validation={"batches": 0})
    assert losses(folder) == losses(undisturbed)
    assert not folder.read("validation.jsonl")


def test_the_best_checkpoint_is_the_one_that_would_serve_best(material, tmp_path):
    checks = {"every_steps": 5, "batches": 2, "tokens_per_anchor": 1}
    folder, summary, code = train(material, tmp_path / "run", **{**THIRTY, "run": {"max_steps": 15}}, validation=checks)
    assert code == 0
    best = max(folder.read("validation.jsonl"), key=lambda record: record["replay_tau"])
    name = f"step-{best['step']:08d}"
    assert (
        json.loads((folder.path / "best.json").read_text())
        == BestCheckpoint(checkpoint=name, tau=best["replay_tau"], by="replay_tau").as_json()
    )
    assert (summary["best_checkpoint"], summary["best_validation_tau"]) == (name, best["replay_tau"]) and best["replay_tau"] != best["tau"]
    recipe, told = card_of_run(folder.path, run_config(folder.path), choose_checkpoint(folder.path))
    assert told == {HELD_OUT: best["tau"], REPLAYED: best["replay_tau"]} and recipe["steps"].startswith(f"{best['step']} of")


def test_teacher_rows_reach_the_drafter(material, local_ray, tmp_path):
    """A mixture with a teacher and with noise, through the actors and in one loop without Ray: the same bits."""
    from dflash_ray.run.build import load_run_target, make_trainer, open_batches
    from dflash_ray.run.spec import resolve

    sections = {"loss": {"ce": 0.5, "kl": 1.0, "tv": 0.25, "dpace": 0.5}, "noise": {"start": 0.2, "end": 0.1, "steps": 4}}
    sections |= {"train": {"epochs": 2, "batches_per_step": 2}, "run": {"max_steps": 6}, "topology": "2-1"}
    folder, _, code = train(material, tmp_path / "run", **sections)
    assert code == 0 and not [event for event in folder.read("events.jsonl") if event["event"] == "set_aside"]
    spec = resolve(validate(tiny_config(material, tmp_path / "run", **sections)), device="cpu", run_dir=tmp_path / "run")
    batches, target = open_batches(spec), load_run_target(spec)
    trainer = make_trainer(spec, -(-batches.info.batches // 2))
    for step, record in enumerate(folder.read("metrics.jsonl")):
        sums = Counter()
        for number in (2 * step, 2 * step + 1):
            batch = batches.batch("train", number)
            features, positions, rows = target.features_and_teacher(batch, spec.shape.block_size)
            sums.update(trainer.micro_step(batch, features, (positions, rows)))
        expected = trainer.step_metrics(sums) | trainer.optimizer_step(step)
        assert {key: record[key] for key in expected if key in record} == {key: expected[key] for key in expected if key in record}
        assert {"loss", "kl", "tv", "grad_norm", "lr", "noise_std"} <= record.keys() & expected.keys() and record["kl"] > 0


@pytest.mark.slow
def test_a_step_of_a_changed_run_is_refused(material, local_ray, tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    train(material, run, train={"epochs": 1}, run={"max_steps": 2})
    shutil.copytree(material / "target", other)
    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.5  # the embedding is the same
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for changed, named in (
        ({"train": {"epochs": 2}}, "total_steps"),
        ({"train": {"epochs": 1}, "anchors": {"tokens_per_anchor": 6}}, "plan"),
    ):
        with pytest.raises(ValueError, match=named):
            train(material, run, run={"resume": "auto"}, **changed)
    with pytest.raises(ValueError, match="total_steps"):
        train(material, tmp_path / "elsewhere", run={"resume": str(next(run.glob("checkpoints/step-*")))}, train={"epochs": 2})
    assert not (tmp_path / "elsewhere").exists()
    assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(ValueError, match="the checkpoint's weights is .* continue with the same weights in target.path"):
        train(material, run, run={"resume": "auto"}, train={"epochs": 1}, target={"path": str(other)})
    assert {path: path.read_bytes() for path in before} == before


def test_config_of_a_run_starts_the_same_run_again(undisturbed, material, local_ray, tmp_path):
    from dflash_ray.config.loading import load_config
    from jobs.support.run_driver import drive, prepare

    config = load_config([undisturbed.path / "config.yaml"], ["--run.dir", str(tmp_path / "again"), "--run.max_steps", "4"])
    drive(prepare(config))
    assert losses(RunFolder(tmp_path / "again")) == losses(undisturbed)[:4]


def test_metrics_say_what_they_promise(undisturbed):
    records = undisturbed.read("metrics.jsonl")
    keys = "step loss accuracy tau tau_blocks lr noise_std real_tokens padded_tokens real_tokens_per_second mean_document_tokens"
    for record in records:
        assert set([*keys.split(), "q_pre", "ahead", "q_hs", "seconds"]) <= record.keys()
        assert record["real_tokens"] <= record["padded_tokens"]
    assert [record["step"] for record in records] == list(range(1, 31))
    summary = json.loads((undisturbed.path / "summary.json").read_text())
    assert summary["topology"] == "1-1" and summary["real_tokens_per_second"] > 0


def odd_data(folder: Path, odd_id: int) -> Path:
    """40 documents, one of which holds `odd_id`; the manifest does not tell."""
    rng = np.random.default_rng(1)
    with DatasetWriter(folder) as writer:
        for number in range(40):
            ids = rng.integers(3, MASK_TOKEN, int(rng.integers(12, 60)))
            ids[6] = odd_id if number == 17 else ids[6]
            writer.add("train", ids, np.arange(len(ids)) >= 4)
        writer.finish({})
    return folder


def test_a_batch_no_target_can_compute_is_set_aside_and_the_run_goes_on(material, local_ray, tmp_path):
    data = odd_data(tmp_path / "data", odd_id=VOCAB + 7)
    folder, summary, code = train(material, tmp_path / "run", data={"path": str(data)}, train={"epochs": 1, "batches_per_step": 1})
    assert code == 0 and summary["finished"]
    aside = [event for event in folder.read("events.jsonl") if event["event"] == "set_aside"]
    assert [17 in event["sample_ids"] for event in aside] == [True] and len(summary["set_aside"]) == 1
    trained = [sample for record in folder.read("trained.jsonl") for sample in record["sample_ids"]]
    assert sorted([*trained, *aside[0]["sample_ids"]]) == list(range(40))


def test_a_mask_token_that_only_the_data_knows_of_ends_the_run(material, local_ray, tmp_path):
    data = odd_data(tmp_path / "data", odd_id=MASK_TOKEN)
    folder, summary, code = train(material, tmp_path / "run", data={"path": str(data)}, train={"epochs": 1, "batches_per_step": 1})
    assert code == 1 and f"draft.mask_token_id: {MASK_TOKEN} occurs in the data" in summary["failed"]


def test_the_first_batch_is_told_once_with_who_got_it_and_when(undisturbed):
    first = [event for event in undisturbed.read("events.jsonl") if event["event"] == "first_batch"]
    (computed_first,) = [line["target"] for line in undisturbed.read("trained.jsonl") if line["arrival"] == 0]
    assert [(event["step"], event["reason"].split()[2]) for event in first] == [(0, computed_first)]
    started = json.loads((undisturbed.path / "run.json").read_text())["started"]
    assert 0 <= first[0]["seconds"] < first[0]["time"] - started, "counted from when the actors were ready, which is later than the start"
