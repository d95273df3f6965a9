"""Copies as kernel launches that can be merged: transposes, concatenation of rows, zeros.

    copied(x)          [A, B, C] of any strides to the same numbers, contiguous
    side_by_side(xs)   [T, K_1], [T, K_2], ... to [T, K_1 + K_2 + ...]

On small graphs launches dominate a step, and transposing one weight costs as much as a layer: the copies of all
members go into one launch.

Shapes: T tasks, K numbers per task.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.ops.launch.backend import use_triton
from weft.ops.launch.custom_op import custom_op
from weft.ops.launch.triton_lang import tl, triton

BLOCK = 1024
DIMENSIONS = 3  # of what one launch copies


@triton.jit
def _copy_kernel(x, out, count, size_b, size_c, step_a, step_b, step_c, step_out, BLOCK: tl.constexpr):
    """``out[a, b, c] = x[a, b, c]``; in ``out`` b and c are contiguous and a is ``step_out`` elements apart."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < count
    c = element % size_c
    b = (element // size_c) % size_b
    a = element // (size_c * size_b)
    value = tl.load(x + a * step_a + b * step_b + c * step_c, mask=inside)
    tl.store(out + a * step_out + b * size_c + c, value, mask=inside)


@triton.jit
def _fill_kernel(out, count, BLOCK: tl.constexpr):
    """Zeros."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + element, tl.zeros([BLOCK], tl.float32).to(out.dtype.element_ty), mask=element < count)


def _copy(x: Tensor, out: Tensor, step_out: int) -> None:
    """Launch the copy of ``x``, at most three dimensions, to ``out``."""
    missing = DIMENSIONS - x.dim()
    (_, size_b, size_c), steps = (*(1,) * missing, *x.shape), (*(0,) * missing, *x.stride())
    _copy_kernel[(-(-x.numel() // BLOCK),)](x, out, x.numel(), size_b, size_c, *steps, step_out, BLOCK=BLOCK)


def zeros_triton(like: Tensor) -> Tensor:
    """Zeros of the shape and type of ``like``, contiguous, by a launch."""
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    if out.numel():
        _fill_kernel[(-(-out.numel() // BLOCK),)](out, out.numel(), BLOCK=BLOCK)
    return out


def copied_triton(x: Tensor) -> Tensor:
    """Launch the copy of ``x``; torch copies more than three dimensions."""
    if x.dim() > DIMENSIONS or not x.numel():
        return x.clone(memory_format=torch.contiguous_format)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _copy(x, out, x.numel() // x.shape[0] if x.dim() == DIMENSIONS else 0)
    return out


@custom_op("weft::copied", mutates_args=(), schema="(Tensor x) -> Tensor")
def copied(x):
    """``x`` in memory of its own, contiguous."""
    return copied_triton(x) if use_triton(x) else x.clone(memory_format=torch.contiguous_format)


@copied.register_fake
def _copied_fake(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def side_by_side_triton(parts: Sequence[Tensor]) -> Tensor:
    """One launch per ``parts [T, K]``, or ``[K]``; all independent."""
    rows = [part if part.dim() == 2 else part[None] for part in parts]
    width = sum(part.shape[1] for part in rows)
    out = rows[0].new_empty(rows[0].shape[0], width)
    begin = 0
    for part in rows:
        if part.numel():
            _copy(part[:, None, :], out[:, begin:], width)
        begin += part.shape[1]
    return out if parts[0].dim() == 2 else out[0]


@custom_op("weft::side_by_side", mutates_args=(), schema="(Tensor[] parts) -> Tensor")
def side_by_side(parts):
    """``[T, K]`` each, of one type, to ``[T, sum of K]``; or ``[K]`` each."""
    return torch.cat(parts, -1)  # outside of a merged launch, torch's single launch is faster


@side_by_side.register_fake
def _side_by_side_fake(parts):
    return parts[0].new_empty(*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))
