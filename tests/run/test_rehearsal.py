"""The largest batch is run once before the first real one, and leaves no trace."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_ray.config.loading import validate
from dflash_ray.draft.blocks.labels import Labels
from dflash_ray.run.build import load_run_target, make_trainer, open_batches
from dflash_ray.run.rehearsal import largest_batch, rehearse_drafter, rehearse_target
from dflash_ray.run.spec import resolve
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
