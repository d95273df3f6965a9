"""split_rows: copy the parameters of T tasks out of their flat rows, each contiguous, in one pass.

    parts[k][t] = flat[t, begin_k : begin_k + sizes[k]]

In a view of ``flat [T, P]`` a parameter's tasks are P numbers apart, and every kernel that reads it would first make it
contiguous: one launch per parameter and use, instead of one for all of them.

Shapes: T tasks, P parameters in all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.ops.launch.custom_op import custom_op


def split_rows_torch(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Reference."""
    return [part.clone(memory_format=torch.contiguous_format) for part in flat.split(list(sizes), dim=1)]


@custom_op("weft::split_rows", mutates_args=(), schema="(Tensor flat, int[] sizes) -> Tensor[]")
def _op(flat, sizes):
    parts = [flat.new_empty(flat.shape[0], size) for size in sizes]
    torch.split_with_sizes_copy(flat.contiguous(), list(sizes), 1, out=parts)  # one kernel on a GPU
    return parts


@_op.register_fake
def _fake(flat, sizes):
    return [flat.new_empty(flat.shape[0], size) for size in sizes]


def _setup(ctx, inputs, output):
    flat, ctx.sizes = inputs
    ctx.save_for_backward(flat.new_empty(0))  # type and device, for unused parts
    ctx.tasks = flat.shape[0]


def _backward(ctx, grads):
    (like,) = ctx.saved_tensors
    pairs = zip(grads, ctx.sizes, strict=True)
    return torch.cat([like.new_zeros(ctx.tasks, n) if g is None else g for g, n in pairs], 1), None


_op.register_autograd(_backward, setup_context=_setup)


def split_rows(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """``flat [T, P]`` as contiguous ``[T, sizes[k]]``, differentiable; the sizes add up to P."""
    if sum(sizes) != flat.shape[1]:
        raise InputError(f"split_rows: sizes add up to {sum(sizes)}; the rows have {flat.shape[1]} numbers")
    return _op(flat, list(sizes))
