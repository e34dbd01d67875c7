"""Optimizers, schedules and noise."""

import math

import numpy as np
import pytest
import torch

from dflash_ray.config.schema import NoiseConfig, OptimizerConfig, ScheduleConfig
from dflash_ray.draft.noise import add_noise
from dflash_ray.draft.optimizers import Optimizer, orthogonalise
from dflash_ray.draft.schedule import noise_std, rate_factor
from tests.support.draft_cases import random, small_batch, small_shape


def rates(total=100, **schedule):
    return [rate_factor(ScheduleConfig(**schedule), step, total) for step in range(total)]


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_warm_up_takes_exactly_its_share_of_steps(name):
    values = rates(name=name, warmup=0.04)
    assert values[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert values[4] == 1.0 and max(values) == 1.0
    assert all(a >= b for a, b in zip(values[4:], values[5:], strict=False))
    assert 0 < values[-1] < 0.06


def test_schedules_at_known_points():
    assert rates(name="linear", warmup=0)[50] == pytest.approx(0.5)
    assert rates(name="cosine", warmup=0)[50] == pytest.approx(0.5)
    assert rates(name="cosine", warmup=0)[25] == pytest.approx((1 + math.sqrt(0.5)) / 2)
    wsd = rates(name="wsd", warmup=0.1, decay=0.2)
    assert set(wsd[10:81]) == {1.0}
    assert wsd[80:] == pytest.approx([(100 - step) / 20 for step in range(80, 100)])


def test_one_step_runs_train_at_full_rate():
    for name in ("cosine", "linear", "wsd"):
        assert rate_factor(ScheduleConfig(name=name), 0, 1) == 1.0


def test_noise_schedule_is_linear_and_then_constant():
    noise = NoiseConfig(start=0.2, end=0.1, steps=10)
    assert [noise_std(noise, step, 100) for step in (0, 5, 10, 99)] == pytest.approx([0.2, 0.15, 0.1, 0.1])
    assert noise_std(NoiseConfig(start=0.2), 50, 100) == pytest.approx(0.1)


def named(*tensors):
    return [(f"p{i}", torch.nn.Parameter(tensor.clone())) for i, tensor in enumerate(tensors)]


def test_adamw_equals_scalar_arithmetic():
    config = OptimizerConfig(lr=0.1, betas=(0.8, 0.9), weight_decay=0.3)
    start, gradients = random(3, 2).float(), [random(3, 2, seed=seed).float() for seed in (1, 2, 3)]
    (pair,) = parameters = named(start)
    optimizer = Optimizer(parameters, config)
    x, m, v = (np.array(start.tolist()), np.zeros((3, 2)), np.zeros((3, 2)))
    for step, gradient in enumerate(gradients, start=1):
        pair[1].grad = gradient
        optimizer.step(0.5)
        g = np.array(gradient.tolist())
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        x = x - 0.05 * 0.3 * x
        x = x - 0.05 * (m / (1 - 0.8**step)) / (np.sqrt(v / (1 - 0.9**step)) + 1e-8)
    assert np.allclose(pair[1].detach().numpy(), x, rtol=1e-5, atol=1e-6)


def test_weight_decay_spares_norm_weights():
    parameters = named(torch.ones(4), torch.ones(4, 4))
    optimizer = Optimizer(parameters, OptimizerConfig(weight_decay=0.5, lr=0.1))
    for _, parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(1.0)
    assert torch.equal(parameters[0][1].detach(), torch.ones(4))
    assert torch.allclose(parameters[1][1].detach(), torch.full((4, 4), 0.95))


@pytest.mark.parametrize("size", [(6, 6), (4, 11), (11, 4)])
def test_orthogonalised_matrices_keep_directions_and_have_singular_values_near_one(size):
    matrices = torch.stack([random(*size, seed=seed).float() for seed in range(3)])
    for matrix, result in zip(matrices, orthogonalise(matrices), strict=True):
        u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
        inside = u.T @ result @ vt.T
        assert (inside - torch.diag(inside.diagonal())).abs().max() < 1e-4
        assert inside.diagonal().min() > 0.5 and inside.diagonal().max() < 1.3


def test_muon_is_the_one_of_torch():
    """Six steps at changing rates, square, wide and tall matrices, two of one shape.

    torch's momentum of 0.95, coefficients, rounds and adjustment of the rate are Keller Jordan's, as ours are. torch orthogonalises
    in bf16 on every device, we in float32 on a CPU: that leaves the two up to 1% of a matrix's way apart. A coefficient that is wrong by 5%
    makes it 12% or more. Momenta are float32 in both and have to be equal.
    """
    sizes = [(24, 24), (16, 48), (48, 16), (48, 16)]
    starts = [random(*size, seed=seed).float() for seed, size in enumerate(sizes)]
    parameters, twins = named(*starts), [torch.nn.Parameter(start.clone()) for start in starts]
    optimizer = Optimizer(parameters, OptimizerConfig(name="muon", muon_lr=0.1, weight_decay=0.1))
    theirs = torch.optim.Muon(twins, weight_decay=0.1)
    for step, factor in enumerate((0.5, 1.0, 1.0, 0.8, 0.6, 0.2)):
        for number, ((_, ours), twin) in enumerate(zip(parameters, twins, strict=True)):
            ours.grad = random(*ours.shape, seed=10 * step + number + 100).float()
            twin.grad = ours.grad.clone()
        optimizer.step(factor)
        theirs.param_groups[0]["lr"] = 0.1 * factor
        theirs.step()
    for (name, ours), twin, start in zip(parameters, twins, starts, strict=True):
        assert torch.equal(optimizer.state()[f"momentum.{name}"], theirs.state[twin]["momentum_buffer"])
        assert (ours - twin).norm() < 0.03 * (twin - start).norm(), name


def test_muon_leaves_vectors_to_adamw():
    parameters = named(random(8, 2).float(), torch.ones(5))
    optimizer = Optimizer(parameters, OptimizerConfig(name="muon", muon_lr=0.1, lr=0.01))
    for seed in (1, 2):
        parameters[0][1].grad, parameters[1][1].grad = random(8, 2, seed=seed).float(), torch.ones(5)
        optimizer.step(0.5)
    assert torch.allclose(parameters[1][1].detach(), torch.full((5,), 1 - 2 * 0.005), atol=1e-6)
    assert set(optimizer.state()) == {"momentum.p0", "exp_avg.p1", "exp_avg_sq.p1", "step.p1"}


def noisy(batch, std=0.1, seed=0, features=None):
    shape = small_shape()
    features = random(batch.tokens, shape.features, dtype=torch.float32) if features is None else features
    return features, add_noise(features, batch, std, seed, taps=2)


def test_noise_has_the_size_of_each_tap():
    batch = small_batch((3000, 1000), (0,))
    base = random(4000, 24, dtype=torch.float32)
    base[:, 12:] *= 50
    features, result = noisy(batch, std=0.2, features=base)
    off = result - features
    assert off[:, :12].std().item() == pytest.approx(0.2 * features[:, :12].square().mean().sqrt().item(), rel=0.02)
    assert off[:, 12:].std().item() == pytest.approx(0.2 * features[:, 12:].square().mean().sqrt().item(), rel=0.02)


def test_noise_never_writes_into_what_was_received():
    features, _ = noisy(small_batch())
    copy = features.clone()
    add_noise(features, small_batch(), 0.5, 0, taps=2)
    assert torch.equal(features, copy)


def test_a_documents_noise_depends_on_seed_epoch_and_sample_alone():
    features = torch.ones(16, 24)  # equal RMS in every batch
    batch = small_batch((9, 7), (0,), sample_ids=(5, 6))
    first = noisy(batch, features=features)[1]
    swapped = noisy(small_batch((7, 9), (0,), sample_ids=(6, 5), number=8), features=features)[1]
    assert torch.equal(first[:9], swapped[7:]) and torch.equal(first[9:], swapped[:7])
    torch.rand(3)
    assert torch.equal(first, noisy(batch, features=features)[1])
    assert not torch.equal(first, noisy(batch, features=features, seed=1)[1])
    later = type(batch)(**{**vars(batch), "epoch": 1})
    assert not torch.equal(first, noisy(later, features=features)[1])
    assert not torch.equal(first[:7], first[9:])
