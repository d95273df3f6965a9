"""split_rows: parts, their gradients, and torch's checks of a custom operator."""

from __future__ import annotations

import pytest
import torch

from weft.core.errors import InputError
from weft.ops.dense.linear import split_rows, split_rows_torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [[7], [1, 6], [3, 0, 4], [2, 2, 2, 1]], ids=str)
@pytest.mark.parametrize("tasks", [1, 3])
def test_parts_and_gradients(tasks, sizes, dtype):
    flat = torch.randn(tasks, 7, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    mine, theirs = split_rows(flat, sizes), split_rows_torch(flat, sizes)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)
        assert a.is_contiguous()
    weights = [torch.full_like(part, k + 1.0) for k, part in enumerate(theirs)]
    grads = [torch.autograd.grad(sum((w * p).sum() for w, p in zip(weights, parts, strict=True)), flat)[0]
             for parts in (mine, theirs)]  # fmt: skip
    assert torch.equal(*grads)


def test_parts_that_nobody_uses_have_a_gradient_of_zero():
    flat = torch.randn(2, 5, requires_grad=True)
    _, second = split_rows(flat, [2, 3])
    (grad,) = torch.autograd.grad(second.sum(), flat)
    assert grad.tolist() == [[0.0, 0.0, 1.0, 1.0, 1.0]] * 2


def test_registration():
    flat = torch.randn(3, 5, requires_grad=True)
    torch.library.opcheck(torch.ops.weft.split_rows.default, (flat, [2, 3]))


def test_sizes_must_fit():
    with pytest.raises(InputError, match="sizes add up to 4; the rows have 5 numbers"):
        split_rows(torch.zeros(2, 5), [2, 2])
