"""The largest batch is run once before the first real one: it takes as much memory as any real one will, and leaves no trace."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity

from dflash_ray.config.loading import validate
from dflash_ray.draft.blocks.labels import Labels
from dflash_ray.run.build import load_run_target, make_trainer, open_batches
from dflash_ray.run.rehearsal import largest_batch, rehearse_drafter, rehearse_target
from dflash_ray.run.spec import resolve
from dflash_ray.target.load import load_target
from tests.support.tiny_runs import tiny_config


def test_it_is_as_large_as_was_asked():
    batch = largest_batch(1000, 37, longest=300)
    assert batch.tokens == 1000 and len(batch.anchors) == 37 and batch.lengths.tolist() == [300, 300, 300, 100]
    assert Labels.of(batch, 8, 4.0).anchors == 37
    assert len(largest_batch(5, 100, longest=300).anchors) == 5


@pytest.mark.parametrize("loss", [{"dpace": 1.0}, {"dpace": 0.0, "kl": 1.0}, {"ce": 1.0}])
def test_it_leaves_no_trace(tmp_path, loss):
    config = validate(tiny_config(tmp_path / "material", tmp_path / "run", loss=loss))
    spec = resolve(config, device="cpu", run_dir=tmp_path / "run")
    batches, target = open_batches(spec), load_run_target(spec)
    plan = batches.info
    states = []
    for rehearsed in (False, True):
        trainer = make_trainer(spec, 3)
        for step in range(2):
            if rehearsed:
                rehearse_target(target, plan.most_tokens, plan.most_anchors, 4, teacher=config.loss.needs_teacher)
                rehearse_drafter(trainer, plan.most_tokens, plan.most_anchors)
            batch = batches.batch("train", step)
            if config.loss.needs_teacher:
                features, positions, rows = target.features_and_teacher(batch, 4)
                trainer.micro_step(batch, features, (np.asarray(positions), rows))
            else:
                trainer.micro_step(batch, target.features(batch))
            trainer.optimizer_step(step)
        states.append(trainer.state_dict()[0])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def memory(call: Callable[[], object], folder: Path) -> tuple[int, int]:
    """Bytes of tensors at the peak of a call and after it, beyond those before; told by torch's allocator, op-internal buffers included."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
        gc.collect()
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    moves = sorted(((event["ts"], event["args"]) for event in events if event["name"] == "[memory]"), key=lambda move: move[0])
    live = np.cumsum([args["Bytes"] for _, args in moves])
    return int(live.max()), int(live[-1])


@pytest.mark.parametrize("loss", [{"dpace": 1.0}, {"dpace": 0.0, "kl": 1.0}, {"ce": 1.0}], ids=["dpace", "kl", "ce+dpace"])
def test_it_takes_as_much_memory_as_the_largest_real_micro_step(tmp_path, loss):
    """That of every batch of an epoch, with its features and the optimizer's state; a rehearsal of half the tokens would take less."""
    sections = {"loss": loss, "anchors": {"tokens_per_anchor": 16}, "train": {"epochs": 1}}
    config = validate(tiny_config(tmp_path / "material", tmp_path / "run", **sections))
    spec = resolve(config, device="cpu", run_dir=tmp_path / "run")
    batches, target, teacher = open_batches(spec), load_run_target(spec), config.loss.needs_teacher
    plan = batches.info
    trainer, real = make_trainer(spec, plan.batches), 0
    for step in range(plan.batches):
        batch = batches.batch("train", step)
        features, *rows = target.features_and_teacher(batch, 4) if teacher else [target.features(batch)]
        peak, _ = memory(lambda: trainer.micro_step(batch, features.clone(), rows or None), tmp_path)  # noqa: B023 - called at once
        trainer.optimizer_step(step)
        real = max(real, peak)
    real += sum(tensor.nbytes for tensor in trainer.optimizer.state().values())
    tokens, anchors = plan.most_tokens, plan.most_anchors
    peak, left = memory(lambda: rehearse_drafter(trainer, tokens, anchors), tmp_path)
    assert real <= peak < 2 * real and left == 0
    assert memory(lambda: rehearse_drafter(trainer, tokens // 2, anchors), tmp_path)[0] < real


@pytest.mark.parametrize("teacher", [False, True])
def test_it_takes_as_much_memory_as_the_largest_real_pass_of_the_target(tmp_path, teacher):
    """In one packed pass, as on a GPU."""
    config = validate(tiny_config(tmp_path / "material", tmp_path / "run", train={"epochs": 1}))
    spec = resolve(config, device="cpu", run_dir=tmp_path / "run")
    batches, plan = open_batches(spec), open_batches(spec).info
    target = load_target(config.target.path, taps=[1, 5], device="cpu", teacher=teacher, fast=True, require_fast=True)
    target.rotary_table(2 * plan.most_tokens)  # grows once and stays
    real = 0
    for number in range(plan.batches):
        batch = batches.batch("train", number)
        peak, _ = memory(lambda: target.features_and_teacher(batch, 4) if teacher else target.features(batch), tmp_path)  # noqa: B023
        real = max(real, peak)
    tokens, anchors = plan.most_tokens, plan.most_anchors
    peak, left = memory(lambda: rehearse_target(target, tokens, anchors, 4, teacher=teacher), tmp_path)
    assert real <= peak < 2 * real and left == 0
    assert memory(lambda: rehearse_target(target, tokens // 2, anchors, 4, teacher=teacher), tmp_path)[0] < real
