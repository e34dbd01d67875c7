"""Matmuls by either library are the same numbers, in both directions, for any number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dflash_ray.linear import FrozenLinear, linear, prefers_onednn


@pytest.mark.parametrize("rows", [1, 3, 4, 8, 15, 16, 17, 63, 64, 300, 1025])
@pytest.mark.parametrize("bias", [False, True])
def test_matmuls_are_right_for_any_number_of_rows(rows, bias):
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 200), torch.randn(320, 200)
    offset = torch.randn(320) if bias else None
    expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    frozen = FrozenLinear(weight, offset)
    quick = FrozenLinear(weight, offset)
    quick.expect_few_rows()
    for out in (linear(x, weight, offset), frozen(x), quick(x), quick(x[None])[0]):
        assert out.shape == expected.shape and out.dtype == torch.float32
        assert (out - expected).abs().max() < 2e-4


@pytest.mark.parametrize("shape", [(300,), (7, 9), (5,)])
def test_gradients_are_those_of_float64(shape):
    torch.manual_seed(0)
    x = torch.randn(*shape, 120, requires_grad=True)
    weight = torch.randn(400, 120, requires_grad=True)
    pull = torch.randn(*shape, 400)
    linear(x, weight).backward(pull)
    exact_x, exact_weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    F.linear(exact_x, exact_weight).backward(pull.double())
    assert (x.grad - exact_x.grad).norm() < 1e-6 * exact_x.grad.norm()
    assert (weight.grad - exact_weight.grad).norm() < 1e-6 * exact_weight.grad.norm()
    frozen_weight = weight.detach()
    other = x.detach().requires_grad_()
    linear(other, frozen_weight).backward(pull)
    assert torch.equal(other.grad, x.grad)


def test_the_same_matmul_has_the_same_bits_whatever_ran_before():
    torch.manual_seed(0)
    weight, x = torch.randn(300, 48), torch.randn(333, 48)
    first = linear(x, weight)
    for rows in range(20, 200, 7):
        linear(torch.randn(rows, 48), weight)
    assert torch.equal(linear(x.clone(), weight.clone()), first)


def test_other_dtypes_and_a_bias_with_gradient_take_the_ordinary_way():
    x, weight, bias = torch.randn(32, 80), torch.randn(400, 80), torch.randn(400, requires_grad=True)
    linear(x, weight, bias).sum().backward()
    assert torch.equal(bias.grad, torch.full((400,), 32.0))
    assert linear(x.double(), weight.double()).dtype == torch.float64
    assert linear(x.bfloat16(), weight.bfloat16()).dtype == torch.bfloat16
    assert isinstance(prefers_onednn(), bool)
