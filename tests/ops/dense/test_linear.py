"""linear and its gradients, over one task or many."""

from __future__ import annotations

import pytest
import torch

from tests.ops.bits import row_mask_of
from tests.ops.comparing import CallsOfWeftOps, assert_agrees, assert_near, assert_registered
from tests.ops.contract import TYPES
from tests.ops.dense.test_bias_act_dropout import ACTIVATE, make
from weft.ops import linear, linear_keep_input
from weft.ops.dense.linear import linear_backward, needs_gradient, weight_grad, weight_grad_torch


def plain(x, weight, bias=None, add=None, act="none", mask=None):
    out = x @ weight.transpose(-2, -1)
    out = out if bias is None else out + bias.unsqueeze(-2)
    out = ACTIVATE[act](out if add is None else out + add)
    return out if mask is None else out * mask


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (3, 5), (17, 2), (64, 65), (65, 64)])
@pytest.mark.parametrize("lead", [(), (3,), (2, 2)], ids=str)
def test_shapes_and_types(lead, inputs, outputs, dtype):
    given = [make(*lead, 11, inputs) / inputs**0.5, make(*lead, outputs, inputs, seed=1), make(*lead, outputs, seed=2)]
    assert_agrees(linear, plain, given, dtype)
    assert_agrees(linear, plain, given[:2], dtype)


@pytest.mark.parametrize("act", ACTIVATE)
@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
def test_epilogue(lead, act):
    x, weight, bias, add = (
        make(*lead, 7, 4),
        make(*lead, 5, 4, seed=1),
        make(*lead, 5, seed=2),
        make(*lead, 7, 5, seed=3),
    )
    clock = torch.tensor([[1, 2], [3, 4], [5, 6]]) if lead else torch.tensor([1, 2])
    masks = [row_mask_of(one, 8, (7, 5), 0.5) for one in clock.reshape(-1, 2)]
    mask = torch.stack(masks) if lead else masks[0]

    def call(x, weight, bias, add):
        return linear(x, weight, bias, add=add, act=act, p=0.5, clock=clock, site=8)

    for dtype in (torch.float64, torch.float32):
        assert_agrees(call, lambda *a: plain(*a, act, mask), [x, weight, bias, add], dtype)


@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (0, 0, None), (None, None, 0)], ids=str)
def test_vmap_equals_loop(dims):
    full = [make(3, 6, 4), make(3, 5, 4, seed=1), make(3, 5, seed=2)]
    given = [value if dim == 0 else value[0] for value, dim in zip(full, dims, strict=True)]

    def loop(*values):
        picked = [[v[t] if d == 0 else v for v, d in zip(values, dims, strict=True)] for t in range(3)]
        return torch.stack([plain(*row) for row in picked])

    assert_agrees(torch.vmap(linear, in_dims=dims), loop, given, torch.float64)


def test_an_input_that_tasks_share_is_not_copied():
    """Forward and weight gradient get the one matrix ``[N, I]``, whatever the number of tasks."""
    x, weight, bias = make(6, 4), make(3, 5, 4, seed=1).requires_grad_(), make(3, 5, seed=2)
    op = lambda w, b: torch.ops.weft.linear(x, w, b, None, "relu", None, None, 0)  # noqa: E731
    with CallsOfWeftOps() as forward:
        out = torch.vmap(op)(weight, bias)
    with CallsOfWeftOps() as backward:
        (grad,) = torch.autograd.grad(out.square().sum(), weight)
    assert forward.calls["weft.linear.default"][1][0].shape == (6, 4)
    assert backward.calls["weft.weight_grad.default"][1][1].shape == (6, 4)
    expected = plain(x, weight, bias, act="relu")
    assert_near(out, expected, 1e-12)
    assert_near(grad, torch.autograd.grad(expected.square().sum(), weight)[0], 1e-12)


def test_gradient_of_an_input_that_tasks_share():
    x, weight = make(6, 4).requires_grad_(), make(3, 5, 4, seed=1)
    out = torch.vmap(lambda w: torch.ops.weft.linear(x, w, None, None, "none", None, None, 0))(weight)
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    assert_near(grad, torch.autograd.grad(plain(x, weight).square().sum(), x)[0], 1e-12)


def test_vmap_in_vmap_with_a_shared_input():
    x, weight = make(2, 6, 4), make(2, 3, 5, 4, seed=1)
    op = lambda x, w: torch.ops.weft.linear(x, w, None, None, "none", None, None, 0)  # noqa: E731
    nested = torch.vmap(lambda x, w: torch.vmap(lambda w: op(x, w))(w))(x, weight)
    assert_near(nested, plain(x[:, None], weight), 1e-12)
    assert_near(torch.vmap(torch.vmap(lambda w: op(x[0], w)))(weight), plain(x[0], weight), 1e-12)


def test_vmap_in_vmap():
    given = [make(2, 3, 6, 4), make(2, 3, 5, 4, seed=1), make(2, 3, 5, seed=2)]
    assert_agrees(torch.vmap(torch.vmap(linear)), plain, given, torch.float64)


def test_gradcheck():
    given = [make(2, 6, 4), make(2, 5, 4, seed=1), make(2, 5, seed=2)]
    assert torch.autograd.gradcheck(linear, [value.requires_grad_() for value in given])


@pytest.mark.parametrize("act", ACTIVATE)
def test_registration(act):
    clock = torch.tensor([[1, 2], [3, 4]])
    given = [make(2, 6, 4), make(2, 5, 4, seed=1), make(2, 5, seed=2), make(2, 6, 5, seed=3)]
    assert_registered(
        lambda x, weight, bias, add: linear(x, weight, bias, add=add, act=act, p=0.5, clock=clock, site=1),
        [value.float().requires_grad_() for value in given],
    )


def test_weight_gradient():
    grad, x = make(2, 9, 3), make(2, 9, 4, seed=1)
    assert_near(weight_grad(grad, x), torch.stack([g.T @ v for g, v in zip(grad, x, strict=True)]), 1e-12)
    assert_near(weight_grad_torch(grad, x), weight_grad(grad, x), 1e-12)
    assert_near(weight_grad(grad, x[0]), torch.stack([g.T @ x[0] for g in grad]), 1e-12)


def test_no_rows():
    x, weight = torch.zeros(0, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    out = linear(x, weight)
    assert out.shape == (0, 3)
    assert torch.autograd.grad(out.sum(), weight)[0].abs().sum() == 0


@pytest.mark.parametrize("act", ACTIVATE)
def test_backward_of_a_whole_layer_is_autograd_s(act):
    x, weight, bias, add = make(9, 4), make(5, 4, seed=1), make(5, seed=2), make(9, 5, seed=3)
    clock, rate = torch.tensor([1, 2]), torch.tensor(0.5)
    given = [value.clone().requires_grad_() for value in (x, weight, bias, add)]
    out = plain(*given, act, row_mask_of(clock, 8, (9, 5), 0.5))
    grad = make(9, 5, seed=4)
    grad_x, *others = torch.autograd.grad(out, given, grad)
    passed = make(9, 4, seed=5)
    mine = linear_backward(grad, out.detach(), x, weight, passed, act, rate, clock, 8, True, True)
    for found, expected in zip(mine, (others[2], grad_x + passed, others[0], others[1]), strict=True):
        torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-5, atol=1e-6)


def test_backward_of_a_whole_layer_keeps_the_rules_of_an_operator():
    x, weight, grad = make(3, 9, 4).float(), make(3, 5, 4, seed=1).float(), make(3, 9, 5, seed=2).float()
    given = (grad, None, x, weight, None, "none", None, None, 0, False, True)
    torch.library.opcheck(linear_backward, given, test_utils=("test_schema", "test_faketensor"))
    one = torch.vmap(lambda g, v, w: linear_backward(g, None, v, w, None, "none", None, None, 0, False, True)[1:])
    for found, expected in zip(one(grad, x, weight), linear_backward(*given)[1:], strict=True):
        torch.testing.assert_close(found, expected)


def test_only_an_input_that_wants_a_gradient_is_passed_on_as_a_result():
    """Under vmap as well: what an autograd function returns always seems to want one."""
    seen = {}

    def look(weight, x, hidden):
        seen.update(weight=needs_gradient(weight), x=needs_gradient(x), hidden=needs_gradient(hidden))
        return linear_keep_input(x, weight)[0]

    weight, x = torch.randn(3, 4, 5, requires_grad=True), torch.randn(7, 5)
    hidden = torch.randn(3, 7, 5)
    torch.vmap(look, in_dims=(0, None, 0))(weight, x, hidden)
    assert seen == {"weight": True, "x": False, "hidden": False}
    torch.vmap(look, in_dims=(0, None, 0))(weight, x, (hidden * weight[:, :1, :1]))
    assert seen["hidden"]
