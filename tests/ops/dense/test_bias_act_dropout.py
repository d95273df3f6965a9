"""Bias, activation and dropout: outputs and gradients, masks by the clock, one task or many."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import elu, relu

from tests.ops.bits import row_mask_of
from tests.ops.comparing import assert_agrees, assert_near, assert_registered, value_and_gradients
from tests.ops.contract import TYPES
from weft.core.errors import InputError
from weft.ops import bias_act_dropout, dropout
from weft.ops import cpu as threads
from weft.ops.random_bits import keep_mask_rows

ACTIVATE = {"none": lambda x: x, "relu": relu, "elu": elu}
CLOCK, SITE = torch.tensor([5, 6]), 9


def plain(x, bias=None, act="none", rate=0.0, clock=CLOCK):
    """One task."""
    out = ACTIVATE[act](x if bias is None else x + bias)
    shape = (*x.shape, 1) if x.dim() == 1 else tuple(x.shape)  # values without columns are rows of one
    return out if rate == 0.0 else out * row_mask_of(clock, SITE, shape, rate).reshape(x.shape)


def make(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("act", ACTIVATE)
@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("width", [1, 3, 17, 64, 65])
def test_widths_and_types(width, rate, act, dtype):
    x, bias = make(13, width), make(width, seed=1)
    assert_agrees(
        lambda x, b: bias_act_dropout(x, b, act, rate, CLOCK, SITE),
        lambda x, b: plain(x, b, act, rate),
        [x, bias],
        dtype,
    )


@pytest.mark.parametrize("act", ACTIVATE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_bias(act, dtype):
    assert_agrees(
        lambda x: bias_act_dropout(x, None, act, 0.25, CLOCK, SITE),
        lambda x: plain(x, None, act, 0.25),
        [make(9, 5)],
        dtype,
    )


@pytest.mark.parametrize("shape", [(7,), (0,), (0, 3), (4, 0), (2, 3, 5), (2, 2, 2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_shape_is_one_task_under_one_clock(shape, dtype):
    assert_agrees(lambda x: dropout(x, 0.5, CLOCK, SITE), lambda x: plain(x, None, "none", 0.5), [make(*shape)], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("act", ACTIVATE)
def test_every_task_has_its_own_clock_and_rate(act, shared, dtype):
    clocks, rates = torch.tensor([[1, 0], [1, 1], [2, 0]]), [0.25, 0.5, 0.75]
    x, bias = make(3, 6, 5), make(5, seed=1) if shared else make(3, 5, seed=1)

    def expected(x, bias):
        biases = [bias] * 3 if shared else bias
        tasks = zip(x, biases, rates, clocks, strict=True)
        return torch.stack([plain(x, b, act, rate, clock) for x, b, rate, clock in tasks])

    def stacked(x, bias):
        return bias_act_dropout(x, bias, act, torch.tensor(rates), clocks, SITE)

    def mapped(x, bias):
        one = lambda x, b, rate, clock: bias_act_dropout(x, b, act, rate, clock, SITE)  # noqa: E731
        return torch.vmap(one, in_dims=(0, None if shared else 0, 0, 0))(x, bias, torch.tensor(rates), clocks)

    assert_agrees(stacked, expected, [x, bias], dtype)
    assert_agrees(mapped, expected, [x, bias], dtype)


def test_a_mask_does_not_depend_on_who_else_is_there():
    """One task alone, in a group of three, in a group of groups: the same bits."""
    x = make(6, 5).float()
    alone = dropout(x, 0.5, torch.tensor([4, 2]), SITE)
    clocks = torch.tensor([[[1, 2], [4, 2], [3, 3]], [[0, 0], [4, 1], [4, 2]]])
    nested = torch.vmap(torch.vmap(lambda clock: dropout(x, 0.5, clock, SITE)))(clocks)
    assert torch.equal(nested[0, 1], alone)
    assert torch.equal(nested[1, 2], alone)
    assert torch.equal(dropout(x.expand(2, 3, 6, 5), 0.5, clocks, SITE)[0, 1], alone)
    assert not torch.equal(nested[1, 1], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("act", ACTIVATE)
@pytest.mark.parametrize("wide", [8, 64, 2100])
def test_padding_moves_no_mask(wide, act, dtype):
    """Columns beside the real ones change neither their values nor their gradients: not a bit."""
    x, bias = make(13, 5).to(dtype), make(5, seed=1).to(dtype)
    padded = torch.nn.functional.pad(x, (0, wide - 5)), torch.nn.functional.pad(bias, (0, wide - 5))
    call = lambda x, b: bias_act_dropout(x, b, act, 0.5, CLOCK, SITE)  # noqa: E731
    wider, wider_grads = value_and_gradients(call, list(padded), torch.ones(13, wide, dtype=dtype))
    out, narrow_grads = value_and_gradients(call, [x, bias], torch.ones(13, 5, dtype=dtype))
    assert torch.equal(wider[:, :5], out)
    assert not wider[:, 5:].any()
    assert torch.equal(wider_grads[0][:, :5], narrow_grads[0])
    assert_near(wider_grads[1][:5], narrow_grads[1].double(), 1e-6 if dtype == torch.float32 else 1e-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("act", ACTIVATE)
def test_heads_side_by_side_may_grow(act, dtype):
    """With ``parts=3`` every head's columns keep their mask when each head is padded from 2 to 5 wide."""
    x, bias = make(7, 6), make(6, seed=1)
    assert_agrees(
        lambda x, b: bias_act_dropout(x, b, act, 0.5, CLOCK, SITE, parts=3),
        lambda x, b: ACTIVATE[act](x + b) * row_mask_of(CLOCK, SITE, (7, 6), 0.5, parts=3),
        [x, bias],
        dtype,
    )
    wide = [torch.nn.functional.pad(v.unflatten(-1, (3, 2)), (0, 3)).flatten(-2).to(dtype) for v in (x, bias)]
    grown = bias_act_dropout(*wide, act, 0.5, CLOCK, SITE, parts=3).unflatten(-1, (3, 5))[..., :2].flatten(-2)
    assert torch.equal(grown, bias_act_dropout(x.to(dtype), bias.to(dtype), act, 0.5, CLOCK, SITE, parts=3))


@pytest.mark.parametrize(("rows", "width"), [(5000, 3), (4100, 40), (3, 4099)])
def test_masks_of_many_rows_and_of_wide_ones(rows, width):
    """Past 4096 rows the upper half of an element's bits changes; past 2048 columns a row has several pieces."""
    for clock, rate in ((CLOCK, torch.tensor(0.5)), (torch.tensor([[1, 2], [3, 4]]), torch.tensor([0.3, 0.6]))):
        x = torch.ones(*clock.shape[:-1], rows, width)
        kept = dropout(x, rate, clock, SITE) != 0
        assert torch.equal(kept, keep_mask_rows(rate, clock, SITE, rows, width))


def test_features_that_tasks_share_are_not_copied(monkeypatch):
    """A shared ``x`` arrives at the kernel as one task's memory."""
    from weft.ops import cpu as dense_calls

    x, clocks, rates = make(6, 5).float(), torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([0.2, 0.5, 0.8])
    sizes = []
    once = dense_calls.once_for_all
    monkeypatch.setattr(dense_calls, "once_for_all", lambda *a: sizes.append(once(*a).numel()) or once(*a))
    out = torch.vmap(lambda rate, clock: dropout(x, rate, clock, SITE))(rates, clocks)
    assert sizes == [30]
    assert torch.equal(out, torch.stack([dropout(x, r, c, SITE) for r, c in zip(rates, clocks, strict=True)]))


def test_one_clock_for_mapped_tasks_gives_all_the_same_mask():
    x = make(3, 6, 5).float().abs() + 1
    out = torch.vmap(lambda x: dropout(x, 0.5, CLOCK, SITE))(x)
    kept = out != 0
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[0], kept[2])


def test_vmap_in_vmap_with_a_clock_of_the_outer_task():
    x, clocks = make(2, 3, 4, 5), torch.tensor([[1, 0], [2, 0]])
    nested = torch.vmap(lambda x, clock: torch.vmap(lambda x: dropout(x, 0.5, clock, SITE))(x))
    expected = torch.stack(
        [torch.stack([plain(v, rate=0.5, clock=c) for v in row]) for row, c in zip(x, clocks, strict=True)]
    )
    assert_near(nested(x, clocks), expected, 1e-12)


@pytest.mark.parametrize("act", ACTIVATE)
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_gradcheck(act, rate):
    x, bias = make(4, 3).requires_grad_(), make(3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda *a: bias_act_dropout(*a, act, rate, CLOCK, SITE), [x, bias])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("act", ACTIVATE)
def test_registration(act, dtype):
    leaves = [make(4, 3).to(dtype).requires_grad_(), make(3, seed=1).to(dtype).requires_grad_()]
    assert_registered(lambda *a: bias_act_dropout(*a, act, 0.5, CLOCK, SITE), leaves)


def test_traced_step_equals_eager():
    x, clocks = make(3, 6, 5).float(), torch.tensor([[1, 0], [1, 1], [2, 0]])

    def step(x, clocks):
        leaf = x.detach().requires_grad_()
        loss = torch.vmap(lambda x, c: bias_act_dropout(x, None, "elu", 0.5, c, SITE))(leaf, clocks).square().sum()
        return x - torch.autograd.grad(loss, leaf)[0]

    traced = make_fx(step, tracing_mode="fake")(x, clocks)
    assert torch.equal(traced(x, clocks), step(x, clocks))
    assert torch.equal(traced(x, clocks + 1), step(x, clocks + 1))


def test_same_bits_on_any_number_of_threads(monkeypatch):
    monkeypatch.setattr(threads, "WORK_OF_A_SHARE", 64)
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(value_and_gradients(lambda x, b: bias_act_dropout(x, b, "elu", 0.5, CLOCK, SITE),
                                               [make(31, 7).float(), make(7).float()]))  # fmt: skip
    finally:
        torch.set_num_threads(before)
    for out, grads in results[1:]:
        assert torch.equal(out, results[0][0])
        assert all(torch.equal(a, b) for a, b in zip(grads, results[0][1], strict=True))


def test_long_inputs_are_cut_into_pieces_that_do_not_show():
    x = make(3, 3001).float()
    for act in ACTIVATE:
        out = bias_act_dropout(x, make(3001).float(), act, 0.5, CLOCK, SITE)
        assert_near(out, plain(x.double(), make(3001).float().double(), act, 0.5), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("act", ACTIVATE)
def test_nan_and_infinity_arrive(act, dtype):
    x = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1.0, -1.0, 0.0]], dtype=dtype)
    for rate in (0.0, 0.5):
        out = bias_act_dropout(x, None, act, rate, CLOCK, SITE)
        assert_near(out, plain(x.double(), None, act, rate), 1e-2 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("act", ["relu", "elu"])
def test_activations_over_the_whole_range(act):
    x = torch.cat([torch.linspace(-100, 10, 4001), torch.linspace(-1e-3, 1e-3, 101), torch.tensor([-1e30, 1e30])])
    out, (grad,) = value_and_gradients(lambda x: bias_act_dropout(x, None, act), [x], torch.ones_like(x))
    expected, (expected_grad,) = value_and_gradients(ACTIVATE[act], [x.double()], torch.ones_like(x))
    assert torch.allclose(out.double(), expected, rtol=3e-7, atol=1e-37)
    assert torch.allclose(grad.double(), expected_grad, rtol=1e-6, atol=1e-6)


def test_nothing_to_do_gives_the_input():
    x = make(3, 3)
    assert bias_act_dropout(x) is x
    assert dropout(x, 0.0, CLOCK) is x
    assert bias_act_dropout(x, None, "none", 0.5, None) is x


def test_rates_and_activations_are_checked():
    for p in (-0.1, 1.0, 1.5):
        with pytest.raises(InputError, match=rf"p={p} must be at least 0 and below 1"):
            dropout(make(2), p, CLOCK)
    with pytest.raises(InputError, match=r"act='gelu' must be one of none, relu, elu"):
        bias_act_dropout(make(2), None, "gelu")
