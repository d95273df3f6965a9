"""Norms against torch's own, with and without the bias of the layer before."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

from weft.nn import BatchNorm, LayerNorm


def pair() -> tuple[BatchNorm, nn.BatchNorm1d]:
    ours, theirs = BatchNorm(5), nn.BatchNorm1d(5)
    for norm in (ours, theirs):
        norm.weight.data = torch.linspace(0.5, 2, 5)
        norm.bias.data = torch.linspace(-1, 1, 5)
    return ours, theirs


def test_batch_norm_with_a_bias_equals_adding_it_first() -> None:
    ours, theirs = pair()
    b = torch.randn(5, requires_grad=True)
    for step in range(4):
        x = torch.randn(11, 5) * (step + 1)
        mine, reference = x.clone().requires_grad_(), x.clone().requires_grad_()
        out, expected = ours(mine, b), theirs(reference + b.detach())
        torch.testing.assert_close(out, expected)
        out.square().sum().backward(), expected.square().sum().backward()
        torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    assert torch.equal(b.grad, torch.zeros(5))
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(x, b), theirs(x + b))


def test_batch_norm_gives_the_bias_its_gradient_in_evaluation() -> None:
    ours, theirs = pair()
    ours.eval(), theirs.eval()
    x, b, c = torch.randn(11, 5), torch.zeros(5, requires_grad=True), torch.zeros(5, requires_grad=True)
    ours(x, b).square().sum().backward(), theirs(x + c).square().sum().backward()
    torch.testing.assert_close(b.grad, c.grad)


def test_batch_norm_updates_the_buffers_it_is_given() -> None:
    norm = BatchNorm(5)
    buffers = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    functional_call(norm, (dict(norm.named_parameters()), buffers), (torch.randn(11, 5), torch.ones(5)))
    assert not torch.equal(buffers["running_mean"], norm.running_mean)
    assert not torch.equal(buffers["running_var"], norm.running_var)
    assert torch.equal(norm.running_mean, torch.zeros(5))


def test_batch_norm_may_run_twice_before_a_backward_pass() -> None:
    norm, b = BatchNorm(5), torch.randn(5, requires_grad=True)
    x = torch.randn(11, 5, requires_grad=True)
    (norm(x, b).square().sum() + norm(2 * x, b).square().sum()).backward()
    assert x.grad is not None


@pytest.mark.parametrize("mode", ["node", "graph"])
def test_layer_norm(mode: str) -> None:
    ours = LayerNorm(5, mode=mode)
    ours.weight.data, ours.bias.data = torch.linspace(0.5, 2, 5), torch.linspace(-1, 1, 5)
    x, b = torch.randn(11, 5), torch.randn(5)
    y = x + b
    over = {"dim": -1, "keepdim": True} if mode == "node" else {}
    deviation = (y.var(unbiased=False, **over) + 1e-5).sqrt()
    expected = (y - y.mean(**over)) / deviation * ours.weight + ours.bias
    torch.testing.assert_close(ours(x, b), expected, rtol=1e-4, atol=1e-4)


def test_reduced_precision_keeps_float_statistics() -> None:
    norm = BatchNorm(5)
    weights = {name: p.detach().bfloat16() for name, p in norm.named_parameters()}
    x = torch.randn(40, 5).bfloat16()
    out = functional_call(norm, weights, (x, torch.ones(5).bfloat16()))
    assert out.dtype == torch.bfloat16
    assert norm.running_mean.dtype == torch.float32
    expected = copy.deepcopy(norm)(x.float())
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)
