"""batch_norm_act_dropout: one task or many against torch's own, with gradients and with what follows the norm."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.ops.bits import row_mask_of
from tests.ops.comparing import assert_agrees, assert_near, assert_registered
from tests.ops.contract import TYPES
from tests.ops.dense.test_bias_act_dropout import ACTIVATE, CLOCK, SITE, make
from weft.core.errors import InputError
from weft.ops.dense.batch_norm import batch_norm_act_dropout, batch_norm_backward_torch, normalise_act_dropout


def batch_norm(x, weight, bias, *ending):
    return batch_norm_act_dropout(x, weight, bias, 1e-5, *ending)[0]


def plain(x, weight, bias):
    """Task by task."""
    if x.dim() == 2:
        return F.batch_norm(x, None, None, weight, bias, True, 0.0, 1e-5)
    return torch.stack([plain(*parts) for parts in zip(x, weight, bias, strict=True)])


def ended(out, act, rate, clock=CLOCK):
    """One task."""
    return ACTIVATE[act](out) * (row_mask_of(clock, SITE, tuple(out.shape), rate) if rate else 1.0)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("lead", [(), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("width", [1, 5, 64])
def test_outputs_and_gradients(width, lead, dtype):
    given = [2 * make(*lead, 13, width) + 1, make(*lead, width, seed=1), make(*lead, width, seed=2)]
    assert_agrees(batch_norm, plain, given, dtype)


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("act", ACTIVATE)
def test_what_follows(act, rate):
    given = [2 * make(13, 5) + 1, make(5, seed=1), make(5, seed=2)]
    for dtype in (torch.float64, torch.float32):
        assert_agrees(
            lambda *a: batch_norm(*a, act, rate, CLOCK, SITE), lambda *a: ended(plain(*a), act, rate), given, dtype
        )


def test_mapped_over_tasks():
    given = [make(3, 7, 5), make(3, 5, seed=1), make(3, 5, seed=2)]
    assert_agrees(torch.vmap(batch_norm), plain, given, torch.float64)
    shared = [given[0], given[1][0], given[2]]
    mapped = torch.vmap(batch_norm, in_dims=(0, None, 0))
    assert_agrees(mapped, lambda x, w, b: plain(x, w.expand(3, 5), b), shared, torch.float64)


def test_every_task_has_its_own_mask():
    given = [make(3, 7, 5), make(3, 5, seed=1), make(3, 5, seed=2)]
    clocks, rates = torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([0.2, 0.5, 0.8])

    def mapped(*a):
        return torch.vmap(lambda x, w, b, r, c: batch_norm(x, w, b, "elu", r, c, SITE))(*a, rates, clocks)

    def alone(*a):
        return torch.stack([ended(plain(*(v[t] for v in a)), "elu", rates[t].item(), clocks[t]) for t in range(3)])

    assert_agrees(mapped, alone, given, torch.float64, 1e-6)  # rates are float32, whatever the features are


def test_statistics():
    x = make(3, 7, 5)
    _, mean, var = batch_norm_act_dropout(x, torch.ones(3, 5).double(), torch.zeros(3, 5).double(), act="relu")
    assert_near(mean, x.mean(1), 1e-12)
    assert_near(var, x.var(1, correction=0), 1e-12)


@pytest.mark.parametrize("act", ACTIVATE)
def test_gradcheck_and_registration(act):
    given = [make(2, 6, 4).requires_grad_(), make(2, 4, seed=1).requires_grad_(), make(2, 4, seed=2).requires_grad_()]
    clocks = torch.tensor([[1, 2], [3, 4]])
    for ending in ((act,), (act, 0.5, clocks, SITE, 2)):
        assert torch.autograd.gradcheck(lambda *a: batch_norm(*a, *ending), given)  # noqa: B023
    assert_registered(lambda *a: batch_norm(*a, act, 0.5, clocks, SITE), given)


def test_by_given_moments():
    x, mean, var = make(2, 7, 5), make(2, 5, seed=1), make(2, 5, seed=2).abs()
    weight, bias = make(2, 5, seed=3), make(2, 5, seed=4)
    out = torch.vmap(lambda *a: normalise_act_dropout(*a, act="relu"))(x, mean, var, weight, bias)
    expected = torch.stack([F.batch_norm(*a) for a in zip(x, mean, var, weight, bias, strict=True)]).relu()
    assert_near(out, expected, 1e-12)
    arguments = (x, mean, var, weight, bias, 1e-5, "elu", None, None, 0)
    torch.library.opcheck(torch.ops.weft.normalise_act_dropout.default, arguments)


def test_columns_of_zeros_stay_zero():
    """What padding relies on: no output and no gradient where weight, bias and input are zero."""
    x, weight, bias = make(6, 4), make(4, seed=1), make(4, seed=2)
    for value in (x, weight, bias):
        value[..., 2:] = 0.0
    out, mean, var = batch_norm_act_dropout(x, weight, bias, act="elu")
    grads = batch_norm_backward_torch(torch.zeros_like(out), x, weight, bias, mean, var, 1e-5, "elu", None, None, 0)
    assert not out[:, 2:].any()
    assert not any(grad[..., 2:].any() for grad in grads)


def test_columns_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match=r"x \[2, 6, 4\] takes columns of shape \[2, 4\], not \[4\]"):
        batch_norm_act_dropout(make(2, 6, 4), make(4), make(4))
    with pytest.raises(InputError, match=r"act='gelu' must be one of none, relu, elu"):
        batch_norm_act_dropout(make(6, 4), make(4), make(4), act="gelu")
