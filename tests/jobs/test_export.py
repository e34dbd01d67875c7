"""From a run folder to files that load: the right checkpoint, the right weights, and one clear line where there is nothing to export."""

import dataclasses
import json

import pytest
import torch
import yaml

from dflash_ray.draft.dflash.export import load_drafter, trained_for
from dflash_ray.run.checkpoint import read_checkpoint, save_checkpoint
from dflash_ray.run.folder import RunFolder
from jobs.export import main
from tests.support.draft_cases import features_for, small_batch, small_trainer
from tests.support.records import checkpoint_meta


def run_folder(tmp_path, *, best=None, ema=None, steps=3, weights_of="5eed"):
    """A run folder with a checkpoint after every step; returns the folder and the trainer's weights at each."""
    trainer = small_trainer(optimizer={"name": "muon"}, train={"ema": ema, "head_chunk": 5})
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(trainer.config.as_dict()))
    batch, weights = small_batch(), {}
    for step in range(steps):
        trainer.micro_step(batch, features_for(batch, trainer.shape))
        trainer.optimizer_step(step)
        tensors, meta = trainer.state_dict()
        meta = checkpoint_meta(step + 1, trainer=meta, shape=trainer.shape.as_dict(), weights=weights_of)
        save_checkpoint(folder / "checkpoints", {name: tensor.clone() for name, tensor in tensors.items()}, meta)
        weights[step + 1] = {name: tensor.clone() for name, tensor in trainer.serving_model.state_dict().items()}
    if best:
        (folder / "best.json").write_text(json.dumps({"checkpoint": f"step-{best:08d}", "tau": 2.25}))
    return folder, trainer, weights


def loaded(out, trainer):
    return load_drafter(out, trainer.embed, trainer.head)[0].state_dict()


def same(exported, weights):
    return all(torch.equal(exported[name].bfloat16(), weights[name].bfloat16()) for name in weights)


@pytest.mark.parametrize(
    ("best", "flags", "expected"),
    [(None, [], 3), (2, [], 2), (2, ["--checkpoint", "latest"], 3), (1, ["--checkpoint", "best"], 1)],
)
def test_which_checkpoint_is_exported(tmp_path, capsys, best, flags, expected):
    folder, trainer, weights = run_folder(tmp_path, best=best)
    assert main(["--run", str(folder), "--output", str(tmp_path / "out"), *flags]) == 0
    assert same(loaded(tmp_path / "out", trainer), weights[expected])
    assert f"step-{expected:08d}" in capsys.readouterr().out
    assert trained_for(tmp_path / "out") == "5eed"
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"- steps: {expected} of 20" in card and f"SHA-256 {trainer.tables}" in card
    assert ("| 2.25 |" in card) == (best == expected)


def test_the_card_says_what_the_run_knows_of_its_checkpoint(tmp_path):
    folder, *_ = run_folder(tmp_path, best=3)
    run = RunFolder(folder)
    for step in (1, 2, 3):
        run.append("metrics.jsonl", {"step": step, "real_tokens": 1000, "supervised_tokens": 400})
        run.append("validation.jsonl", {"step": step, "tau": 2 + step / 10, "replay_tau": 1 + step / 10})
    assert (
        main(["--run", str(folder), "--output", str(tmp_path / "out"), "--checkpoint", str(folder / "checkpoints" / "step-00000002")]) == 0
    )
    card = (tmp_path / "out" / "README.md").read_text()
    assert "mean over fixed blocks | 2.20 |" in card and "replayed block after block as in serving | 1.20 |" in card
    assert "- tokens: 2,000 seen, 800 of them supervised" in card and "- seed: 0" in card
    assert "Not measured" not in card


def test_a_run_continued_in_another_folder_does_not_know_all_the_tokens_seen(tmp_path):
    folder, *_ = run_folder(tmp_path)
    for step in (2, 3):
        RunFolder(folder).append("metrics.jsonl", {"step": step, "real_tokens": 1000, "supervised_tokens": 400})
    assert main(["--run", str(folder), "--output", str(tmp_path / "out")]) == 0
    assert "tokens:" not in (tmp_path / "out" / "README.md").read_text()


def test_where_a_checkpoint_tells_no_target_the_export_does_not_either(tmp_path):
    """Random weights have no fingerprint."""
    folder, *_ = run_folder(tmp_path, weights_of="")
    assert main(["--run", str(folder), "--output", str(tmp_path / "out")]) == 0
    assert trained_for(tmp_path / "out") is None


@pytest.mark.parametrize(
    "key, says", [("shape", "shape of meta.json is not a drafter's"), ("trainer", "total_steps of trainer in meta.json")]
)
def test_a_checkpoint_without_a_drafter_is_one_clear_line(tmp_path, key, says):
    folder, *_ = run_folder(tmp_path)
    newest = folder / "checkpoints" / "step-00000003"
    checkpoint = read_checkpoint(newest)
    save_checkpoint(folder / "checkpoints", checkpoint.tensors(), dataclasses.replace(checkpoint.meta, **{key: {}}))
    with pytest.raises(ValueError, match=says):
        main(["--run", str(folder), "--output", str(tmp_path / "out")])


def test_a_fingerprint_that_is_none_is_one_clear_line(tmp_path):
    folder, *_ = run_folder(tmp_path, weights_of=5)
    with pytest.raises(ValueError, match="weights of meta.json is not a text"):
        main(["--run", str(folder), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_named_checkpoint_and_averaged_weights(tmp_path):
    folder, trainer, weights = run_folder(tmp_path, ema=0.9)
    path = folder / "checkpoints" / "step-00000002"
    assert main(["--run", str(folder), "--output", str(tmp_path / "out"), "--checkpoint", str(path)]) == 0
    assert same(loaded(tmp_path / "out", trainer), weights[2])
    assert not same(weights[2], trainer.model.state_dict())


@pytest.mark.parametrize(
    ("spoil", "flags", "says"),
    [
        (lambda folder: (folder / "config.yaml").unlink(), [], "no config.yaml; this is not the folder of a run"),
        (lambda folder: None, ["--checkpoint", "best"], "no validated checkpoint"),
        (lambda folder: None, ["--checkpoint", "nowhere"], "checkpoint nowhere: no such folder"),
        (
            lambda folder: [path.write_bytes(b"x") for path in folder.glob("checkpoints/*/state.safetensors")],
            [],
            "no whole checkpoint in it: .*step-00000003: state.safetensors has 1 bytes",
        ),
    ],
)
def test_nothing_to_export_is_one_clear_line(tmp_path, spoil, flags, says):
    folder, *_ = run_folder(tmp_path)
    spoil(folder)
    with pytest.raises(ValueError, match=says):
        main(["--run", str(folder), "--output", str(tmp_path / "out"), *flags])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("config.json", '{"model_type": "qwen3"}', "holds another model"),
        ("config.json", "{", "--output .*other: "),
        ("notes.txt", "mine", "holds 'notes.txt' and no drafter"),
    ],
)
def test_a_folder_of_something_else_is_left_alone(tmp_path, name, text, says):
    folder, *_ = run_folder(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / name).write_text(text)
    with pytest.raises(ValueError, match=says):
        main(["--run", str(folder), "--output", str(other)])
    assert {path.name: path.read_text() for path in other.iterdir()} == {name: text}


def test_an_export_is_replaced_and_so_is_half_of_one(tmp_path):
    folder, *_ = run_folder(tmp_path)
    half = tmp_path / "half"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"torn")
    for _ in range(2):
        assert main(["--run", str(folder), "--output", str(half)]) == 0
        (half / "notes.txt").write_text("beside an export, which has a name of its own for each of its files")
    assert (half / "config.json").exists()


def test_a_place_that_cannot_be_written_is_one_clear_line(tmp_path):
    folder, *_ = run_folder(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--output .*file/out"):
        main(["--run", str(folder), "--output", str(tmp_path / "file" / "out")])


def test_a_best_without_its_tau_is_one_clear_line(tmp_path):
    folder, *_ = run_folder(tmp_path, best=2)
    (folder / "best.json").write_text('{"checkpoint": "step-00000002"}')
    with pytest.raises(ValueError, match="best.json: tau is 'None', not a number"):
        main(["--run", str(folder), "--output", str(tmp_path / "out")])
