"""Norms with what follows them: every kernel against its torch reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ops.interpreted.packed import numbers
from tests.ops.interpreted.test_dense_kernels import TYPES, clocks
from weft.ops.dense.batch_norm import (
    batch_norm_backward_torch,
    batch_norm_backward_triton,
    batch_norm_torch,
    batch_norm_triton,
    moments_triton,
    normalise_torch,
    normalise_triton,
)
from weft.ops.dense.bias_act_dropout import bias_act_dropout_triton
from weft.ops.dense.layer_norm import (
    layer_norm_backward_torch,
    layer_norm_backward_triton,
    layer_norm_torch,
    layer_norm_triton,
)
from weft.ops.launch.backend import H200, assume_limits

SHAPES = [(9, 3), (3, 70, 17), (300, 130)]
ENDINGS = [("none", None), ("none", 0.4), ("relu", None), ("relu", 0.4), ("elu", None), ("elu", 0.4)]


def assert_close(mine, theirs, dtype: torch.dtype) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-4)


def ending_of(act: str, rate: float | None, lead: tuple[int, ...], parts: int = 1) -> tuple:
    return (act, None, None, 3, parts) if rate is None else (act, torch.full(lead, rate), clocks(*lead), 3, parts)


def columns_of(shape: tuple[int, ...], count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [numbers(*shape[:-2], shape[-1], dtype=dtype, seed=seed) for seed in range(2, 2 + count)]


def check_batch_norm(shape, dtype, act, rate, parts=1) -> None:
    x, grad = numbers(*shape, dtype=dtype, seed=1) + 2, numbers(*shape, dtype=dtype)
    weight, bias = columns_of(shape, 2, torch.promote_types(dtype, torch.float32))
    ending = ending_of(act, rate, shape[:-2], parts)
    out, mean, var = batch_norm_torch(x, weight, bias, 1e-5, *ending)
    assert_close(batch_norm_triton(x, weight, bias, 1e-5, *ending), (out, mean, var), dtype)
    given = grad, x, weight, bias, mean, var, 1e-5, *ending
    assert_close(batch_norm_backward_triton(*given), batch_norm_backward_torch(*given), dtype)


def check_layer_norm(shape, dtype, act, rate, with_b, parts=1) -> None:
    x, grad = numbers(*shape, dtype=dtype, seed=1) + 2, numbers(*shape, dtype=dtype)
    weight, shift, b = columns_of(shape, 3, dtype)
    b, ending = b if with_b else None, ending_of(act, rate, shape[:-2], parts)
    out, mean, rstd = layer_norm_torch(x, b, weight, shift, 1e-5, *ending)
    assert_close(layer_norm_triton(x, b, weight, shift, 1e-5, *ending), (out, mean, rstd), dtype)
    given = grad, x, b, weight, shift, mean, rstd, *ending
    assert_close(layer_norm_backward_triton(*given), layer_norm_backward_torch(*given), dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_norm_sizes_and_types(shape, dtype):
    check_batch_norm(shape, dtype, "none", None)


@pytest.mark.parametrize(("act", "rate"), ENDINGS)
def test_batch_norm_endings(act, rate):
    for shape, dtype in (((3, 40, 5), torch.float32), ((11, 7), torch.bfloat16)):
        check_batch_norm(shape, dtype, act, rate)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm_sizes_and_types(shape, dtype):
    check_layer_norm(shape, dtype, "none", None, with_b=True)


@pytest.mark.parametrize(("act", "rate"), ENDINGS)
@pytest.mark.parametrize("with_b", [False, True])
def test_layer_norm_endings(with_b, act, rate):
    for shape, dtype in (((3, 40, 5), torch.float32), ((11, 7), torch.bfloat16)):
        check_layer_norm(shape, dtype, act, rate, with_b)


@pytest.mark.parametrize("act", ["relu", "elu"])
def test_heads_side_by_side(act):
    check_batch_norm((2, 9, 6), torch.float32, act, 0.4, parts=2)
    check_layer_norm((2, 9, 6), torch.float32, act, 0.4, with_b=True, parts=3)


def test_masks_are_those_of_plain_dropout():
    x, rate, clock = numbers(2, 9, 6), torch.full((2,), 0.5), clocks(2)
    expected = bias_act_dropout_triton(torch.ones(2, 9, 6), None, "none", rate, clock, 3, 2) != 0
    ones, zeros = torch.ones(2, 6), torch.zeros(2, 6)
    for out in (
        batch_norm_triton(x, ones, zeros, 1e-5, "none", rate, clock, 3, 2)[0],
        layer_norm_triton(x, None, ones, zeros, 1e-5, "none", rate, clock, 3, 2)[0],
    ):
        assert torch.equal(out != 0, expected)


def test_ranges_of_several_tiles():
    """As on graphs with more tiles than a device has programs for; the last range is short."""
    with assume_limits(replace(H200, sms=1)):
        check_batch_norm((2, 1700, 5), torch.float32, "relu", 0.4)
        check_layer_norm((2, 1700, 5), torch.float32, "relu", 0.4, with_b=True)


def test_moments_where_the_mean_is_large():
    x = 1e-2 * numbers(1000, 3) + 1e4
    x[0] = 0.0  # and the first value far off
    for given in (x[1:].contiguous(), x):
        mean, var = moments_triton(given)
        torch.testing.assert_close(mean.double(), given.double().mean(0), rtol=1e-6, atol=0)
        torch.testing.assert_close(var.double(), given.double().var(0, correction=0), rtol=1e-3, atol=0)


def test_moments_of_one_row_and_of_none():
    one = batch_norm_triton(numbers(1, 5), torch.ones(5), torch.zeros(5), 1e-5, *ending_of("relu", None, ()))
    assert torch.equal(one[2], torch.zeros(5))
    out, mean, _ = batch_norm_triton(numbers(0, 5), torch.ones(5), torch.zeros(5), 1e-5, *ending_of("relu", None, ()))
    assert (out.shape, mean.shape) == ((0, 5), (5,))


@pytest.mark.parametrize(("act", "rate"), [("none", None), ("relu", None), ("elu", 0.4)])
def test_normalise_by_given_moments(act, rate):
    x, (mean, var, weight, bias) = numbers(2, 9, 6), columns_of((2, 9, 6), 4, torch.float32)
    given = x, mean, var.abs(), weight, bias, 1e-5, *ending_of(act, rate, (2,))
    assert_close([normalise_triton(*given)], [normalise_torch(*given)], torch.float32)


@pytest.mark.parametrize("act", ["none", "relu", "elu"])
def test_nan_stays_visible(act):
    x = numbers(5, 4)
    x[2, 1] = float("nan")
    ending = ending_of(act, None, ())
    out = layer_norm_triton(x, None, torch.ones(4), torch.zeros(4), 1e-5, *ending)[0]
    assert torch.equal(out.isnan(), (torch.arange(5) == 2)[:, None].expand(5, 4))
    out = batch_norm_triton(x, torch.ones(4), torch.zeros(4), 1e-5, *ending)[0]
    assert torch.equal(out.isnan(), (torch.arange(4) == 1).expand(5, 4))


def test_tasks_have_the_bits_they_have_alone():
    x, grad = numbers(3, 300, 6, seed=1), numbers(3, 300, 6)
    weight, bias, b = columns_of((3, 300, 6), 3, torch.float32)
    rate, clock = torch.tensor([0.1, 0.5, 0.9]), clocks(3)
    out, mean, var = batch_norm_triton(x, weight, bias, 1e-5, "relu", rate, clock, 3)
    grads = batch_norm_backward_triton(grad, x, weight, bias, mean, var, 1e-5, "relu", rate, clock, 3)
    rows = layer_norm_triton(x, b, weight, bias, 1e-5, "elu", rate, clock, 3)
    row_grads = layer_norm_backward_triton(grad, x, b, weight, bias, *rows[1:], "elu", rate, clock, 3)
    for t in range(3):
        ending = rate[t], clock[t], 3
        alone = batch_norm_triton(x[t], weight[t], bias[t], 1e-5, "relu", *ending)
        given = grad[t], x[t], weight[t], bias[t], *alone[1:], 1e-5, "relu", *ending
        assert all(map(torch.equal, alone, (out[t], mean[t], var[t])))
        assert all(map(torch.equal, batch_norm_backward_triton(*given), (value[t] for value in grads)))
        alone = layer_norm_triton(x[t], b[t], weight[t], bias[t], 1e-5, "elu", *ending)
        given = grad[t], x[t], b[t], weight[t], bias[t], *alone[1:], "elu", *ending
        assert all(map(torch.equal, alone, (value[t] for value in rows)))
        assert all(map(torch.equal, layer_norm_backward_triton(*given), (value[t] for value in row_grads)))
