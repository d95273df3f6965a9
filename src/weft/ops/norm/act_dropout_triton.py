"""The epilogue of a norm inside its kernels: activation and dropout of a tile, and their backward.

The backward of both is computed from the activation's input, which the norm recomputes, and from the clock: neither an
output nor a mask is saved.
"""

from __future__ import annotations

from torch import Tensor

from weft.ops.dense.tiles_triton import activate, drop_scale
from weft.ops.launch.triton_lang import per_task_stride, tl, triton
from weft.ops.random.triton_bits import mix_key

TILE = 2048  # elements of a norm's tile: 16 per thread


@triton.jit
def drop_key(clock, rate, task, site, stride_clock, stride_rate, DROP: tl.constexpr):
    """``(key, rate)`` of a task; zeros without dropout."""
    key = tl.full([], 0, tl.uint64)
    fraction = tl.full([], 0.0, tl.float32)
    if DROP:
        key = mix_key(clock + task * stride_clock, site)
        fraction = tl.load(rate + task * stride_rate).to(tl.float32)
    return key, fraction


@triton.jit
def end(value, key, fraction, n, f, F: tl.constexpr, W: tl.constexpr, ACT: tl.constexpr, DROP: tl.constexpr):
    """``dropout(act(value))`` of a tile."""
    value = activate(value, ACT)
    if DROP:
        value *= drop_scale(key, fraction, n, f, F, W).to(value.dtype)
    return value


@triton.jit
def end_backward(
    grad, value, key, fraction, n, f, F: tl.constexpr, W: tl.constexpr, ACT: tl.constexpr, DROP: tl.constexpr
):
    """The gradient to ``value``, of which :func:`end` was taken, from that to its result."""
    if DROP:
        grad *= drop_scale(key, fraction, n, f, F, W).to(grad.dtype)
    if ACT == "relu":
        grad = tl.where(value > 0.0, grad, 0.0)
    elif ACT == "elu":
        grad = tl.where(value > 0.0, grad, grad * tl.exp(value))
    return grad


def drop_arguments(rate: Tensor | None, clock: Tensor | None, tasks: int, instead: Tensor) -> tuple:
    """``(rate, clock, stride_rate, stride_clock)`` for a launch; missing ones are any tensor, unread."""
    if rate is None or clock is None:
        return instead, instead, 0, 0
    return rate.contiguous(), clock.contiguous(), per_task_stride(rate, tasks, 1), per_task_stride(clock, tasks, 2)
