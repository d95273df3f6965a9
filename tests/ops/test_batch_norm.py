"""batch_norm: one task or many against torch's own, with gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from weft.ops.batch_norm import batch_norm, batch_norm_backward_torch

from .comparing import assert_agrees, assert_near, assert_registered
from .contract import TYPES
from .test_dropout import make


def plain(x, weight, bias):
    """Task by task."""
    if x.dim() == 2:
        return F.batch_norm(x, None, None, weight, bias, True, 0.0, 1e-5)
    return torch.stack([plain(*parts) for parts in zip(x, weight, bias, strict=True)])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("lead", [(), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("width", [1, 5, 64])
def test_outputs_and_gradients(width, lead, dtype):
    given = [2 * make(*lead, 13, width) + 1, make(*lead, width, seed=1), make(*lead, width, seed=2)]
    assert_agrees(lambda *a: batch_norm(*a)[0], plain, given, dtype)


def test_mapped_over_tasks():
    given = [make(3, 7, 5), make(3, 5, seed=1), make(3, 5, seed=2)]
    assert_agrees(torch.vmap(lambda *a: batch_norm(*a)[0]), plain, given, torch.float64)
    shared = [given[0], given[1][0], given[2]]
    mapped = torch.vmap(lambda x, w, b: batch_norm(x, w, b)[0], in_dims=(0, None, 0))
    assert_agrees(mapped, lambda x, w, b: plain(x, w.expand(3, 5), b), shared, torch.float64)


def test_statistics():
    x = make(3, 7, 5)
    _, mean, var = batch_norm(x, torch.ones(3, 5).double(), torch.zeros(3, 5).double())
    assert_near(mean, x.mean(1), 1e-12)
    assert_near(var, x.var(1, correction=0), 1e-12)


def test_gradcheck_and_registration():
    given = [make(2, 6, 4).requires_grad_(), make(2, 4, seed=1).requires_grad_(), make(2, 4, seed=2).requires_grad_()]
    assert torch.autograd.gradcheck(lambda *a: batch_norm(*a)[0], given)
    assert_registered(lambda *a: batch_norm(*a)[0], given)


def test_columns_of_zeros_stay_zero():
    """What padding relies on: no output and no gradient where weight, bias and input are zero."""
    x, weight, bias = make(6, 4), make(4, seed=1), make(4, seed=2)
    for value in (x, weight, bias):
        value[..., 2:] = 0.0
    out, mean, var = batch_norm(x, weight, bias)
    grads = batch_norm_backward_torch(torch.zeros_like(out), x, weight, mean, var, 1e-5)
    assert not out[:, 2:].any()
    assert not any(grad[..., 2:].any() for grad in grads)
