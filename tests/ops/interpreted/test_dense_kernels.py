"""Epilogue, linear, weight gradient, column sums, loss, optimizer: every kernel against its torch reference."""

from __future__ import annotations

import pytest
import torch

from tests.ops.interpreted.packed import assert_same, numbers
from weft.ops.dense.adam import adam_torch, adam_triton
from weft.ops.dense.bias_act_dropout import (
    bias_act_dropout_backward_bias_torch,
    bias_act_dropout_backward_bias_triton,
    bias_act_dropout_backward_torch,
    bias_act_dropout_backward_triton,
    bias_act_dropout_torch,
    bias_act_dropout_triton,
    column_sum_torch,
    column_sum_triton,
)
from weft.ops.dense.cross_entropy import (
    cross_entropy_parts_triton,
    cross_entropy_rows_backward_torch,
    cross_entropy_rows_backward_triton,
    cross_entropy_rows_torch,
    cross_entropy_rows_triton,
)
from weft.ops.dense.linear import linear_backward_torch, linear_torch, weight_grad_torch
from weft.ops.dense.linear_triton import (
    LinearBackwardLaunch,
    WeightGradLaunch,
    linear_backward_triton,
    linear_triton,
    weight_grad_triton,
)
from weft.ops.dense.linear_triton import choose_weight_grad_launch as choose_weight_launch
from weft.ops.dense.tiles_triton import add_parts
from weft.ops.launch.hooks import intercepted
from weft.ops.random_bits import keep_mask_rows

TYPES = [torch.float32, torch.float64, torch.bfloat16]


def clocks(*lead: int) -> torch.Tensor:
    return (torch.arange(2 * torch.Size(lead).numel()) - 1).reshape(*lead, 2)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("act", ["none", "relu", "elu"])
@pytest.mark.parametrize(("lead", "rate"), [((), None), ((3,), 0.4), ((2, 2), 0.4)])
def test_epilogue(lead, rate, act, dtype):
    x, grad = numbers(*lead, 5, 7, dtype=dtype), numbers(*lead, 5, 7, dtype=dtype, seed=2)
    random = (None, None) if rate is None else (torch.full(lead, rate), clocks(*lead))
    size = torch.float32 if dtype == torch.float64 else dtype  # rates are float32, whatever the features are
    for bias in (None, numbers(*lead, 7, dtype=dtype, seed=1)):
        out = bias_act_dropout_triton(x, bias, act, *random, 3)
        assert_same(out, bias_act_dropout_torch(x, bias, act, *random, 3), size)
    mine = bias_act_dropout_backward_triton(grad, out, act, *random, 3)
    assert_same(mine, bias_act_dropout_backward_torch(grad, out, act, *random, 3), size)
    shape = torch.Size((*lead, 7))
    mine = bias_act_dropout_backward_bias_triton(grad, out, shape, act, *random, 3)
    assert_same(mine, bias_act_dropout_backward_bias_torch(grad, out, shape, act, *random, 3), size)


@pytest.mark.parametrize("act", ["none", "relu", "elu"])
def test_epilogue_with_a_bias_that_tasks_share(act):
    x, bias, clock, rate = numbers(3, 5, 7), numbers(7, seed=1), clocks(3), torch.tensor([0.1, 0.5, 0.9])
    out = bias_act_dropout_triton(x, bias, act, rate, clock, 3)
    assert_same(out, bias_act_dropout_torch(x, bias, act, rate, clock, 3), x.dtype)
    grad = numbers(3, 5, 7, seed=2)
    mine = bias_act_dropout_backward_bias_triton(grad, out, bias.shape, act, rate, clock, 3)
    assert_same(mine, bias_act_dropout_backward_bias_torch(grad, out, bias.shape, act, rate, clock, 3), x.dtype)


def test_epilogue_with_a_clock_that_tasks_share():
    x, bias = numbers(3, 5, 7), numbers(3, 7, seed=1)
    rate, clock = torch.tensor(0.5), torch.tensor([4, 5])
    out = bias_act_dropout_triton(x, bias, "relu", rate, clock, 3)
    assert_same(out, bias_act_dropout_torch(x, bias, "relu", rate, clock, 3), x.dtype)
    grad = numbers(3, 5, 7, seed=2)
    mine = bias_act_dropout_backward_bias_triton(grad, out, bias.shape, "elu", rate, clock, 3)
    assert_same(mine, bias_act_dropout_backward_bias_torch(grad, out, bias.shape, "elu", rate, clock, 3), x.dtype)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.999])
def test_kernels_keep_the_same_elements_as_torch(rate):
    x, fraction = torch.ones(3, 4100, 2), torch.full((3,), rate)
    clock = torch.tensor([[0, 0], [-1, 7], [2**63 - 1, 2**40]])
    kept = bias_act_dropout_triton(x, None, "none", fraction, clock, 11) != 0
    assert torch.equal(kept, keep_mask_rows(fraction, clock, 11, 4100, 2))


@pytest.mark.parametrize("act", ["none", "relu", "elu"])
def test_epilogue_over_heads_side_by_side(act):
    x, bias, clock, rate = numbers(3, 5, 6), numbers(3, 6, seed=1), clocks(3), torch.tensor([0.1, 0.5, 0.9])
    out = bias_act_dropout_triton(x, bias, act, rate, clock, 3, 2)
    assert_same(out, bias_act_dropout_torch(x, bias, act, rate, clock, 3, 2), x.dtype)
    grad = numbers(3, 5, 6, seed=2)
    mine = bias_act_dropout_backward_triton(grad, out, act, rate, clock, 3, 2)
    assert_same(mine, bias_act_dropout_backward_torch(grad, out, act, rate, clock, 3, 2), x.dtype)
    mine = bias_act_dropout_backward_bias_triton(grad, out, bias.shape, act, rate, clock, 3, 2)
    assert_same(mine, bias_act_dropout_backward_bias_torch(grad, out, bias.shape, act, rate, clock, 3, 2), x.dtype)


def test_epilogue_of_an_input_that_tasks_share():
    x, clock, rate = numbers(5, 7).expand(3, 5, 7), clocks(3), torch.tensor([0.1, 0.5, 0.9])
    mine = bias_act_dropout_triton(x, None, "none", rate, clock, 3)
    assert_same(mine, bias_act_dropout_torch(x, None, "none", rate, clock, 3), x.dtype)


@pytest.mark.parametrize("act", ["none", "relu", "elu"])
def test_nan_and_infinity_arrive(act):
    x = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1.0, -1.0, 0.0]])
    for rate, clock in ((None, None), (torch.tensor(0.5), clocks())):
        mine = bias_act_dropout_triton(x, None, act, rate, clock, 0)
        assert_same(mine, bias_act_dropout_torch(x, None, act, rate, clock, 0), x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # no bfloat16 dots in the interpreter
@pytest.mark.parametrize("act", ["none", "relu", "elu"])
@pytest.mark.parametrize(("lead", "inputs", "outputs"), [((), 3, 5), ((), 70, 17), ((2,), 16, 16)])
def test_linear(lead, inputs, outputs, act, dtype):
    x, weight = numbers(*lead, 21, inputs, dtype=dtype), numbers(*lead, outputs, inputs, dtype=dtype, seed=1)
    bias, add = numbers(*lead, outputs, dtype=dtype, seed=2), numbers(*lead, 21, outputs, dtype=dtype, seed=3)
    for extra in ((None, None), (bias, None), (bias, add)):
        for random in ((None, None), (torch.full(lead, 0.5), clocks(*lead))):
            mine = linear_triton(x, weight, *extra, act, *random, 5)
            if dtype == torch.float16:  # the kernel rounds once, at the end
                wide = [None if value is None else value.float() for value in (x, weight, *extra)]
                assert_same(mine.float(), linear_torch(*wide, act, *random, 5), dtype)
            else:
                assert_same(mine, linear_torch(x, weight, *extra, act, *random, 5), dtype)


def test_linear_with_shared_operands():
    x, weight = numbers(2, 9, 4), numbers(5, 4, seed=1)
    for left, right in ((x, weight), (x[0], numbers(2, 5, 4, seed=2))):
        assert_same(linear_triton(left, right), left @ right.transpose(-2, -1), torch.float32)


@pytest.mark.parametrize(("inputs", "outputs"), [(72, 80), (9, 65), (45, 72), (130, 5)])
def test_linear_with_a_few_more_inputs_and_outputs_than_its_tiles(inputs, outputs):
    """Narrow tiles beside the last ones: in all that follows the product, too."""
    x, weight, bias, add = (
        numbers(2, 70, inputs),
        numbers(2, outputs, inputs),
        numbers(2, outputs),
        numbers(2, 70, outputs),
    )
    given = (x, weight, bias, add, "relu", torch.tensor([0.25, 0.5]), clocks(2), 5)
    torch.testing.assert_close(linear_triton(*given), linear_torch(*given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inputs", [17, 90])
def test_weight_grad_of_a_few_more_outputs_than_a_tile(inputs):
    grad, x = numbers(300, 72), numbers(300, inputs, seed=1)
    launch = choose_weight_launch(72, inputs)
    assert launch.block_extra
    torch.testing.assert_close(weight_grad_triton(grad, x, launch), weight_grad_torch(grad, x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # no bfloat16 dots in the interpreter
@pytest.mark.parametrize(("lead", "rows"), [((), 200), ((2,), 70), ((2,), 300)])
def test_weight_grad(lead, rows, dtype):
    grad, x = numbers(*lead, rows, 5, dtype=dtype), numbers(*lead, rows, 17, dtype=dtype, seed=1)
    mine = weight_grad_triton(grad, x, WeightGradLaunch(16, 16, 16, programs=8))
    expected = weight_grad_torch(grad.float(), x.float()).to(dtype)
    torch.testing.assert_close(mine, expected, rtol=2e-2, atol=2e-4 if dtype == torch.float32 else 0.3)


def test_weight_grad_of_an_input_that_tasks_share():
    grad, x = numbers(3, 70, 5), numbers(70, 17, seed=1)
    mine = weight_grad_triton(grad, x, WeightGradLaunch(16, 16, 16, programs=8))
    torch.testing.assert_close(mine, weight_grad_torch(grad, x), rtol=2e-2, atol=2e-4)


@pytest.mark.parametrize(("tasks", "parts", "sizes"), [(1, 1, (5, 0)), (2, 37, (40, 3)), (1, 200, (33, 31))])
def test_add_parts(tasks, parts, sizes):
    partial = numbers(tasks, parts, sum(sizes))
    first, second = add_parts(partial, sizes, torch.float32)
    torch.testing.assert_close(torch.cat([first, second], 1), partial.sum(1), rtol=1e-4, atol=1e-4)
    assert (first.shape[1], second.shape[1]) == sizes


@pytest.mark.parametrize("act", ["none", "relu", "elu"])
@pytest.mark.parametrize(("lead", "inputs", "outputs"), [((), 7, 5), ((2,), 40, 17)])
def test_linear_backward(lead, inputs, outputs, act):
    x, weight = numbers(*lead, 70, inputs), numbers(*lead, outputs, inputs, seed=1)
    random = (torch.full(lead, 0.25), clocks(*lead), 3)
    out = linear_torch(x, weight, None, None, act, *random)
    grad, passed = numbers(*lead, 70, outputs, seed=2), numbers(*lead, 70, inputs, seed=3)
    given = (grad, out, x, weight, passed, act, *random)
    launch = LinearBackwardLaunch(block_rows=16, block_in=16, programs=6)
    expected = linear_backward_torch(*given, True, True)
    for found in (linear_backward_triton(*given, True, True, launch), linear_backward_triton(*given, True, True)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_linear_backward_of_an_input_that_tasks_share():
    x, weight, grad = numbers(50, 6), numbers(3, 4, 6, seed=1), numbers(3, 50, 4, seed=2)
    given = (grad, None, x, weight, None, "none", None, None, 0, False, False)
    found = linear_backward_triton(*given)
    assert found[0].numel() == found[1].numel() == 0
    assert_same(found[2:], linear_backward_torch(*given)[2:], torch.float32)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 3), (2, 300, 17), (0, 3), (70, 130)], ids=str)
def test_column_sum(shape, dtype):
    x = numbers(*shape, dtype=dtype)
    mine = column_sum_triton(x, programs=4)
    assert mine.dtype == dtype
    assert_same(mine.double(), column_sum_torch(x.double()), dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("lead", "classes"), [((), 3), ((2,), 7), ((), 1100)])
def test_cross_entropy(lead, classes, dtype):
    logits = 3 * numbers(*lead, 8, classes, dtype=dtype)
    labels, rows = torch.arange(8) % classes, torch.tensor([0, 3, 4, 7, 6])
    assert_same(cross_entropy_rows_triton(logits, labels, rows), cross_entropy_rows_torch(logits, labels, rows), dtype)
    grad_loss = 1 + torch.arange(torch.Size(lead).numel()).reshape(lead).to(torch.promote_types(dtype, torch.float32))
    mine = cross_entropy_rows_backward_triton(grad_loss, logits, labels, rows)
    assert_same(mine, cross_entropy_rows_backward_torch(grad_loss, logits, labels, rows), dtype)


@pytest.mark.parametrize("count", [1, 100, 128, 130, 257, 512, 513])
def test_cross_entropy_of_few_rows_is_one_launch_of_the_same_sums(count):
    """128 rows per block of 8 classes: one program takes up to four blocks, and adds what several would have given."""
    logits, labels = 3 * numbers(2, 600, 7), torch.arange(600) % 7
    rows = torch.arange(600)[:count]
    parts = cross_entropy_parts_triton(logits, labels, rows)[..., 0]
    launched = []
    with intercepted(lambda kernel, grid, launch: launched.append(grid) or launch):
        found = cross_entropy_rows_triton(logits, labels, rows)
    assert parts.shape[1] == -(-count // 128)
    assert launched == [(1 if count <= 512 else 5, 2)]
    expected = parts[:, 0].clone()
    for place in range(1, parts.shape[1]):
        expected += parts[:, place]
    assert torch.equal(found, expected) if count <= 512 else torch.allclose(found, expected)
    assert_same(found, cross_entropy_rows_torch(logits, labels, rows), torch.float32)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
def test_adam_looks_its_rows_up(lead, shared):
    table = numbers(*(() if shared else lead), 5, 10, seed=9).abs()
    state = [numbers(*lead, 700, seed=k) for k in range(3)] + [numbers(*lead, 700, seed=3).square()]
    clock = torch.tensor([[7, 3], [7, 3]])
    for step in (clock[:1, 1], torch.tensor([0])):
        mine, apart, theirs = ([value.clone() for value in state] for _ in range(3))
        adam_triton(*mine, table, None, step)
        adam_triton(*apart, table.index_select(-2, step).squeeze(-2), None)
        adam_torch(*theirs, table, None, step)
        assert all(torch.equal(a, b) for a, b in zip(mine, apart, strict=True))
        assert_same(mine, theirs, torch.float32)


@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_adam(masked, lead):
    rows = torch.tensor([1e-2, 0.9, 0.999, 1e-8, 0.1, 0.0, 0.1, 0.001, 0.1, 0.001]).expand(*lead, 10).clone()
    if lead:
        rows[1, 5] = 1.0
        rows[2, 0] = 0.5
    mask = (torch.arange(700) % 2).float() if masked else None
    state = [numbers(*lead, 700, seed=k) for k in range(3)] + [numbers(*lead, 700, seed=3).square()]
    mine, theirs = [value.clone() for value in state], [value.clone() for value in state]
    adam_triton(*mine, rows, mask)
    adam_torch(*theirs, rows, mask)
    assert_same(mine, theirs, torch.float32)
