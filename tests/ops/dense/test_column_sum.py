"""column_sum: the sum over the rows."""

from __future__ import annotations

import pytest
import torch

from tests.ops.comparing import TOLERANCE, assert_near
from tests.ops.contract import TYPES
from tests.ops.dense.test_bias_act_dropout import make
from weft.ops.dense.bias_act_dropout import column_sum, column_sum_torch


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 3), (0, 3), (4, 0), (2, 7, 65), (2, 3, 4, 1)], ids=str)
def test_shapes_and_types(shape, dtype):
    x = make(*shape).to(dtype)
    expected = sum((x.double()[..., row, :] for row in range(shape[-2])), torch.zeros(*shape[:-2], shape[-1]).double())
    for function in (column_sum, column_sum_torch, torch.ops.weft.column_sum):
        assert_near(function(x), expected, TOLERANCE[dtype])


def test_vmap_equals_loop():
    x = make(3, 5, 2)
    assert_near(torch.vmap(column_sum)(x), torch.stack([column_sum(task) for task in x]), 1e-12)
    assert_near(torch.vmap(torch.ops.weft.column_sum, in_dims=1)(x.movedim(0, 1)), x.sum(-2), 1e-12)


def test_registration():
    torch.library.opcheck(torch.ops.weft.column_sum.default, (make(2, 5, 3).float(),))
