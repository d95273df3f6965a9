"""layer_norm_act_dropout: one task or many against torch's own, with gradients and with what follows the norm."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.ops.comparing import assert_agrees, assert_near, assert_registered
from tests.ops.contract import TYPES
from tests.ops.dense.test_batch_norm import ended
from tests.ops.dense.test_bias_act_dropout import ACTIVATE, CLOCK, SITE, make
from weft.core.errors import InputError
from weft.ops.dense.layer_norm import layer_norm_act_dropout


def layer_norm(x, weight, shift, b=None, *ending):
    return layer_norm_act_dropout(x, b, weight, shift, 1e-5, *ending)


def plain(x, weight, shift, b=None):
    """Task by task."""
    if weight.dim() == 1:
        return F.layer_norm(x if b is None else x + b, weight.shape, weight, shift, 1e-5)
    given = (x, weight, shift) if b is None else (x, weight, shift, b)
    return torch.stack([plain(*parts) for parts in zip(*given, strict=True)])


def inputs(*shape: int) -> list[torch.Tensor]:
    return [2 * make(*shape) + 1, *(make(*shape[:-2], shape[-1], seed=seed) for seed in (1, 2, 3))]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("lead", [(), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("width", [3, 5, 64])
def test_outputs_and_gradients(width, lead, dtype):
    given = inputs(*lead, 13, width)
    assert_agrees(layer_norm, plain, given, dtype)
    assert_agrees(layer_norm, plain, given[:3], dtype)


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("act", ACTIVATE)
def test_what_follows(act, rate):
    for dtype in (torch.float64, torch.float32):
        assert_agrees(
            lambda *a: layer_norm(*a, act, rate, CLOCK, SITE),
            lambda *a: ended(plain(*a), act, rate), inputs(13, 5), dtype,
        )  # fmt: skip


@pytest.mark.parametrize("shape", [(0, 3), (2, 3, 5), (5,)], ids=str)
def test_all_dimensions_but_the_last_are_rows(shape):
    given = [make(*shape), *(make(shape[-1], seed=seed) for seed in (1, 2, 3))]
    assert_agrees(
        lambda *a: layer_norm(*a, "relu", 0.5, CLOCK, SITE),
        lambda *a: ended(plain(*a), "relu", 0.5), given, torch.float64, 1e-6,
    )  # fmt: skip


def test_mapped_over_tasks():
    clocks, rates = torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([0.2, 0.5, 0.8])
    given = inputs(3, 7, 4)

    def mapped(*a):
        return torch.vmap(lambda x, w, s, b, r, c: layer_norm(x, w, s, b, "elu", r, c, SITE))(*a, rates, clocks)

    def alone(*a):
        return torch.stack([ended(plain(*(v[t] for v in a)), "elu", rates[t].item(), clocks[t]) for t in range(3)])

    assert_agrees(mapped, alone, given, torch.float64, 1e-6)  # rates are float32, whatever the features are
    shared = [given[0], given[1][0], given[2], given[3][0]]
    mapped_shared = torch.vmap(layer_norm, in_dims=(0, None, 0, None))
    expanded = lambda x, w, s, b: plain(x, w.expand(3, 4), s, b.expand(3, 4))  # noqa: E731
    assert_agrees(mapped_shared, expanded, shared, torch.float64)


def test_heads_side_by_side_have_the_mask_of_plain_dropout():
    from weft.ops import bias_act_dropout

    given = [value.float() for value in inputs(7, 6)]
    out = layer_norm(*given, "relu", 0.5, CLOCK, SITE, 3)
    assert_near(out, bias_act_dropout(plain(*given), None, "relu", 0.5, CLOCK, SITE, 3), 1e-6)


@pytest.mark.parametrize("act", ACTIVATE)
def test_gradcheck_and_registration(act):
    given = [value.requires_grad_() for value in inputs(2, 6, 4)]
    clocks = torch.tensor([[1, 2], [3, 4]])
    for ending in ((act,), (act, 0.5, clocks, SITE, 2)):
        assert torch.autograd.gradcheck(lambda *a: layer_norm(*a, *ending), given)  # noqa: B023
    assert_registered(lambda *a: layer_norm(*a, act, 0.5, clocks, SITE), given)
    assert_registered(lambda *a: layer_norm(*a, None, act), given[:3])


def test_what_does_not_fit_is_refused():
    with pytest.raises(InputError, match=r"x \[2, 6, 4\] takes columns of shape \[2, 4\], not \[4\]"):
        layer_norm(make(2, 6, 4), make(2, 4), make(2, 4), make(4))
    with pytest.raises(InputError, match=r"act='gelu' must be one of none, relu, elu"):
        layer_norm(make(6, 4), make(4), make(4), None, "gelu")


def test_a_clock_that_is_not_that_of_the_columns_is_refused():
    x, columns = torch.randn(3, 5, 4), torch.ones(3, 4)
    with pytest.raises(InputError, match=r"a clock of shape \[2\] for columns of shape \[3, 4\]"):
        layer_norm_act_dropout(x, None, columns, columns, p=0.5, clock=torch.tensor([1, 2]))
    with pytest.raises(InputError, match=r"a clock of shape \[3, 2\]"):
        layer_norm_act_dropout(x, None, columns[0], columns[0], p=0.5, clock=torch.ones(3, 2, dtype=torch.int64))
