"""The arithmetic of a dry run is what the actors hold and send."""

from __future__ import annotations

import dataclasses
import gc
import tracemalloc

import numpy as np
import pytest

from dflash_ray.config.loading import validate
from dflash_ray.config.schema import BatchingConfig
from dflash_ray.data.batches.plan import RunPlan
from dflash_ray.planning.memory import plan_memory, run_memory
from dflash_ray.run.build import load_run_target, make_trainer
from dflash_ray.run.rehearsal import largest_batch
from dflash_ray.run.spec import resolve
from tests.support.tiny_runs import dense_material, tiny_config


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    folder = dense_material(tmp_path_factory.mktemp("memory"))
    config = validate(tiny_config(folder, folder / "run", loss={"kl": 1.0, "dpace": 0.0}))
    return resolve(config, device="cpu", run_dir=folder / "run")


@pytest.mark.parametrize("anchors", [[0, 20, 40], range(0, 90, 2), range(100)], ids=["apart", "overlapping", "everywhere"])
def test_a_message_with_teacher_rows_is_as_large_as_was_said(spec, anchors):
    """Every position travels once, however many blocks want it; blocks at a document's end want fewer."""
    batch = dataclasses.replace(largest_batch(100, 1, longest=100), anchors=np.array(anchors, np.int32))
    features, positions, rows = load_run_target(spec).features_and_teacher(batch, spec.shape.block_size)
    sent, said = features.nbytes + positions.nbytes + rows.nbytes, spec.message_bytes(100, len(anchors))
    memory = run_memory(spec, 100, len(anchors))
    assert memory.message.bytes == said and memory.target["features"].bytes == features.nbytes
    assert sent <= said <= 1.05 * sent
    assert rows.nbytes <= memory.target["teacher rows"].bytes <= 1.15 * rows.nbytes


def test_staged_teacher_rows_are_as_large_as_was_said(spec):
    batch = dataclasses.replace(largest_batch(100, 1, longest=100), anchors=np.arange(0, 90, 2).astype(np.int32))
    features, positions, rows = load_run_target(spec).features_and_teacher(batch, spec.shape.block_size)
    staged = make_trainer(spec, 3).stage(batch, features, (positions, rows))
    memory = run_memory(spec, 100, 45)
    assert memory.drafter["teacher rows"].bytes == 2 * staged.teacher.nbytes and memory.drafter["features"].bytes == 2 * features.nbytes


def test_a_plan_is_as_large_as_was_said():
    rng = np.random.default_rng(0)
    tracemalloc.start()
    try:
        lengths, candidates = rng.integers(20, 4000, 20_000), rng.integers(1, 20, 20_000)
        plan = RunPlan(lengths, np.minimum(candidates, 9), BatchingConfig(strategy="packed"), 0, 6)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert plan.total_batches > 0 and 0.95 < held / plan_memory(20_000, 6).bytes < 1.2


def test_waiting_token_batches_are_as_large_as_was_said(spec):
    batch = largest_batch(100, 7, longest=100)
    sent = batch.input_ids.nbytes + batch.loss_mask.nbytes + batch.anchors.nbytes
    assert run_memory(spec, 100, 7).tokens.bytes == spec.config.flow.prefetch_batches * sent
