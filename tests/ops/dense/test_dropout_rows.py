"""dropout_rows: a part of a matrix has the mask that the fused operator gives to those rows of the whole."""

from __future__ import annotations

import pytest
import torch

from weft import ops
from weft.ops.dense.bias_act_dropout import dropout_rows

CLOCK = torch.tensor([7, 3])


@pytest.mark.parametrize("parts", [1, 2])
def test_parts_are_rows_of_the_whole(parts):
    x = torch.randn(20, 6)
    whole = ops.bias_act_dropout(x, None, "none", 0.4, CLOCK, 2, parts)
    pieces = [dropout_rows(x[a:b], 0.4, CLOCK, 2, a, parts) for a, b in ((0, 7), (7, 7), (7, 20))]
    assert torch.equal(torch.cat(pieces), whole)


def test_stored_values():
    values = torch.randn(30)
    whole = ops.dropout(values, 0.3, CLOCK, 1)
    assert torch.equal(
        torch.cat([dropout_rows(values[:11], 0.3, CLOCK, 1), dropout_rows(values[11:], 0.3, CLOCK, 1, 11)]), whole
    )


def test_tasks_have_masks_of_their_own():
    x, clocks, rates = torch.randn(3, 8, 4), torch.arange(6).view(3, 2), torch.tensor([0.1, 0.5, 0.0])
    whole = torch.vmap(lambda x, rate, clock: ops.bias_act_dropout(x, None, "none", rate, clock, 0))(x, rates, clocks)
    part = torch.vmap(lambda x, rate, clock: dropout_rows(x, rate, clock, 0, 3))(x[:, 3:], rates, clocks)
    assert torch.equal(part, whole[:, 3:])


def test_nothing_is_dropped_without_a_clock():
    x = torch.randn(4, 2)
    assert dropout_rows(x, 0.5, None, 0) is x
    assert dropout_rows(x, 0.0, CLOCK, 0) is x
