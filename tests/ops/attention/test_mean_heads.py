"""mean_heads: heads averaged, with a bias or without."""

from __future__ import annotations

import pytest
import torch

from tests.ops.comparing import assert_agrees
from tests.ops.contract import TYPES
from tests.ops.dense.test_bias_act_dropout import make
from weft.core.errors import InputError
from weft.ops import mean_heads
from weft.ops.attention.mean_heads import _op


def plain(x, bias=None):
    out = sum(x[..., head, :] for head in range(x.shape[-2])) / x.shape[-2]
    if bias is None:
        return out
    return out + (bias if bias.dim() == 1 else bias[..., None, :])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 3, 4), (0, 3, 4), (2, 7, 1, 5), (2, 2, 3, 2, 9)], ids=str)
def test_shapes_and_types(shape, dtype):
    assert_agrees(mean_heads, plain, [make(*shape)], dtype)
    for bias in (make(shape[-1], seed=1), make(*shape[:-3], shape[-1], seed=1)):
        assert_agrees(mean_heads, plain, [make(*shape), bias], dtype)


@pytest.mark.parametrize("shared", [True, False])
def test_vmap_equals_stacked_tasks(shared):
    x, bias = make(3, 6, 2, 5), make(5, seed=1) if shared else make(3, 5, seed=1)
    mapped = torch.vmap(mean_heads, in_dims=(0, None if shared else 0))
    assert_agrees(mapped, plain, [x, bias], torch.float64)


def test_heads_share_the_memory_of_their_gradient():
    x = make(6, 4, 5).requires_grad_()
    seen = []
    x.register_hook(lambda grad: seen.append(grad.stride(-2)))
    mean_heads(x, make(5, seed=1)).sum().backward()
    assert seen == [0]


@pytest.mark.parametrize("with_bias", [True, False])
def test_registration(with_bias):
    bias = make(2, 5, seed=1).float().requires_grad_() if with_bias else None
    torch.library.opcheck(_op, (make(2, 6, 3, 5).float().requires_grad_(), bias))


def test_a_bias_must_fit():
    with pytest.raises(InputError, match=r"bias has shape \[4\]; x \[2, 6, 3, 5\] takes \[5\]"):
        mean_heads(torch.zeros(2, 6, 3, 5), torch.zeros(4))
