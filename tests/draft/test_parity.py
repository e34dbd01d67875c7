"""Numbers that two public trainers and a serving forward agree on, reproduced from the same weights, features and anchors."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflash_ray.config.loading import load_config
from dflash_ray.config.schema import LossConfig
from dflash_ray.data.batches.batch import Batch
from dflash_ray.draft.blocks.labels import Labels
from dflash_ray.draft.blocks.mask import Blocks
from dflash_ray.draft.dflash.model import DraftModel
from dflash_ray.draft.dflash.shape import FULL, DraftShape
from dflash_ray.draft.loss import block_losses
from dflash_ray.draft.trainer import DraftTrainer


@pytest.fixture(scope="module")
def case(shared):
    target_shape = json.loads((shared / "parity" / "dflash_case.json").read_text())
    tensors = load_file(shared / "parity" / "dflash_case.safetensors")
    config = target_shape["config"]
    shape = DraftShape(
        hidden=config["hidden_size"],
        vocab=config["vocab_size"],
        intermediate=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        layer_types=(FULL,) * config["num_hidden_layers"],
        sliding_window=None,
        block_size=config["block_size"],
        mask_token_id=config["mask_token_id"],
        target_layer_ids=tuple(range(1, 1 + config["num_taps"])),
        num_target_layers=8,
        rope_theta=config["rope_theta"],
        rms_norm_eps=config["rms_norm_eps"],
        max_position_embeddings=4096,
    )
    rows, length = tensors["input_ids"].shape
    anchors = [row * length + int(a) for row in range(rows) for a in tensors["anchors"][row][tensors["anchor_valid"][row] == 1]]
    batch = Batch(
        number=0,
        epoch=0,
        sample_ids=np.arange(rows),
        input_ids=tensors["input_ids"].flatten().numpy().astype(np.int32),
        cu_seqlens=np.arange(0, (rows + 1) * length, length, dtype=np.int32),
        loss_mask=tensors["loss_mask"].flatten().numpy().astype(np.uint8),
        anchors=np.sort(anchors).astype(np.int32),
    )
    weights = {name.removeprefix("draft."): value for name, value in tensors.items() if name.startswith("draft.")}
    return shape, batch, tensors, weights, target_shape["expected"]


@pytest.mark.parametrize(("name", "gamma"), [("ce, gamma=7", 7.0), ("ce, no decay", 1e12)])
def test_loss_and_gradient_sum(case, name, gamma):
    shape, batch, tensors, weights, expected = case
    model = DraftModel(shape)
    model.load_state_dict(weights)
    labels = Labels.of(batch, shape.block_size, gamma)
    features = tensors["hidden_states"].flatten(0, 1)
    rows = model(features, Blocks.of(batch, shape.block_size), tensors["embed_tokens.weight"], labels.slots)
    result = block_losses(rows.detach(), tensors["lm_head.weight"], labels, LossConfig(ce=1, dpace=0), chunk=16)
    assert result.sums["ce"] / result.sums["weight"] == pytest.approx(expected[name]["loss"], abs=1e-5)
    rows.backward(result.gradients["weight"])
    total = sum(parameter.grad.abs().sum().item() for parameter in model.parameters()) / result.sums["weight"]
    assert total == pytest.approx(expected[name]["grad_abs_sum"], rel=1e-5)


def test_the_trainer_divides_to_the_same_gradient(case):
    """The whole path of a step, down to the gradient that the optimizer sees."""
    shape, batch, tensors, weights, expected = case
    config = load_config(overrides={"loss": {"ce": 1.0, "dpace": 0.0, "gamma": 7.0}, "optimizer": {"clip": 1e9}})
    trainer = DraftTrainer(config, shape, tensors["embed_tokens.weight"], tensors["lm_head.weight"], "cpu", 10)
    trainer.model.load_state_dict(weights)
    sums = trainer.micro_step(batch, tensors["hidden_states"].flatten(0, 1))
    assert trainer.step_metrics(sums)["loss"] == pytest.approx(expected["ce, gamma=7"]["loss"], abs=1e-5)
    trainer.optimizer_step(0)
    momenta = [value for name, value in trainer.state_dict()[0].items() if name.startswith("optimizer.exp_avg.")]
    total = sum(value.abs().sum().item() for value in momenta) / (1 - config.optimizer.betas[0])
    assert total == pytest.approx(expected["ce, gamma=7"]["grad_abs_sum"], rel=1e-5)
    assert all(torch.isfinite(value).all() for value in momenta)
