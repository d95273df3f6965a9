"""Triton kernels of ``layer_norm.py``: a tile holds whole rows, so that each direction is one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.dense.tiles_triton import add_parts
from weft.ops.launch.backend import accumulate_dtype, limits_of, next_power_of_2
from weft.ops.launch.triton_lang import tl, triton, triton_acc
from weft.ops.norm.act_dropout_triton import TILE, drop_arguments, drop_key, end, end_backward

WIDEST = 1024  # features of a row that a tile can hold
MOST_ROWS = 128


@triton.jit
def _forward_kernel(
    x, b, weight, shift, rate, clock, out, mean, rstd, N, eps, site, stride_rate, stride_clock,
    F: tl.constexpr, W: tl.constexpr, HAS_B: tl.constexpr, ACT: tl.constexpr, DROP: tl.constexpr,
    ACC: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    task = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    f = tl.arange(0, BF)
    in_f = f < F
    mask = (n < N)[:, None] & in_f[None, :]
    at = (task * N + n)[:, None] * F + f[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(ACC)
    if HAS_B:
        value += tl.load(b + task * F + f, mask=in_f, other=0.0).to(ACC)[None, :]
    centre = tl.sum(value, 1) / F
    away = tl.where(in_f[None, :], value - centre[:, None], 0.0)
    deviation = 1.0 / tl.sqrt(tl.sum(away * away, 1) / F + eps)
    scale = tl.load(weight + task * F + f, mask=in_f, other=0.0).to(ACC)[None, :]
    move = tl.load(shift + task * F + f, mask=in_f, other=0.0).to(ACC)[None, :]
    # Rounded once, here and in the backward pass: both must see the same sign.
    value = tl.fma(away * deviation[:, None], scale, move)
    key, fraction = drop_key(clock, rate, task, site, stride_clock, stride_rate, DROP)
    value = end(value, key, fraction, n, f, F, W, ACT, DROP)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)
    tl.store(mean + task * N + n, centre, mask=n < N)
    tl.store(rstd + task * N + n, deviation, mask=n < N)


@triton.jit
def _backward_kernel(
    grad, x, b, weight, shift, mean, rstd, rate, clock, grad_x, partial, N, rows_per_program, site,
    stride_rate, stride_clock,
    F: tl.constexpr, W: tl.constexpr, HAS_B: tl.constexpr, ACT: tl.constexpr, DROP: tl.constexpr,
    ACC: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """The gradient to a range of rows, and the sums over them that make up those to weight, shift and b."""
    part = tl.program_id(0)
    task = tl.program_id(1).to(tl.int64)
    f = tl.arange(0, BF)
    in_f = f < F
    scale = tl.load(weight + task * F + f, mask=in_f, other=0.0).to(ACC)[None, :]
    move = tl.load(shift + task * F + f, mask=in_f, other=0.0).to(ACC)[None, :]
    key, fraction = drop_key(clock, rate, task, site, stride_clock, stride_rate, DROP)
    first = part * rows_per_program
    last = tl.minimum(first + rows_per_program, N)
    to_weight = tl.zeros([BN, BF], ACC)
    to_shift = tl.zeros([BN, BF], ACC)
    to_b = tl.zeros([BN, BF], ACC)
    for base in range(first, last, BN):
        n = (base + tl.arange(0, BN)).to(tl.int64)
        mask = (n < last)[:, None] & in_f[None, :]
        at = (task * N + n)[:, None] * F + f[None, :]
        value = tl.load(x + at, mask=mask, other=0.0).to(ACC)
        if HAS_B:
            value += tl.load(b + task * F + f, mask=in_f, other=0.0).to(ACC)[None, :]
        centre = tl.load(mean + task * N + n, mask=n < last, other=0.0).to(ACC)
        deviation = tl.load(rstd + task * N + n, mask=n < last, other=0.0).to(ACC)[:, None]
        normal = tl.where(mask, value - centre[:, None], 0.0) * deviation
        slope = tl.load(grad + at, mask=mask, other=0.0).to(ACC)
        slope = end_backward(slope, tl.fma(normal, scale, move), key, fraction, n, f, F, W, ACT, DROP)
        to_weight += slope * normal
        to_shift += slope
        slope *= scale
        along = tl.sum(slope * normal, 1) / F
        level = tl.sum(slope, 1) / F
        slope = (slope - level[:, None] - normal * along[:, None]) * deviation
        to_b += slope
        tl.store(grad_x + at, slope.to(grad_x.dtype.element_ty), mask=mask)
    into = partial + (task * tl.num_programs(0) + part) * (3 if HAS_B else 2) * F + f
    tl.store(into, tl.sum(to_weight, 0), mask=in_f)
    tl.store(into + F, tl.sum(to_shift, 0), mask=in_f)
    if HAS_B:
        tl.store(into + 2 * F, tl.sum(to_b, 0), mask=in_f)


def _sizes(x: Tensor, weight: Tensor) -> tuple[int, int, int]:
    """Tasks, rows of a task and features."""
    tasks, F = weight.shape[:-1].numel(), x.shape[-1]
    return tasks, x.numel() // max(1, tasks * F), F


def _constants(x: Tensor, b: Tensor | None, act: str, rate: Tensor | None, parts: int) -> dict:
    F = x.shape[-1]
    block_f = next_power_of_2(F)
    return {
        "F": F, "W": F // parts, "HAS_B": b is not None, "ACT": act, "DROP": rate is not None,
        "ACC": triton_acc(x.dtype), "BN": max(1, min(MOST_ROWS, TILE // block_f)), "BF": block_f, "num_warps": 4,
    }  # fmt: skip


def layer_norm_triton(
    x: Tensor,
    b: Tensor | None,
    weight: Tensor,
    shift: Tensor,
    eps: float,
    act: str,
    rate: Tensor | None,
    clock: Tensor | None,
    site: int,
    parts: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, mean, rstd)``, shaped like ``x [..., N, F]`` and its rows."""
    tasks, N, _ = _sizes(x, weight)
    x, kept = x.contiguous(), accumulate_dtype(x.dtype)
    out = torch.empty_like(x)
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=kept) for _ in range(2))
    if x.numel():
        constants = _constants(x, b, act, rate, parts)
        rates, clocks, *strides = drop_arguments(rate, clock, tasks, x)
        _forward_kernel[(-(-N // constants["BN"]), tasks)](
            x, x if b is None else b.contiguous(), weight.contiguous(), shift.contiguous(), rates, clocks,
            out, mean, rstd, N, eps, site, *strides, **constants,
        )  # fmt: skip
    return out, mean, rstd


def layer_norm_backward_triton(
    grad: Tensor,
    x: Tensor,
    b: Tensor | None,
    weight: Tensor,
    shift: Tensor,
    mean: Tensor,
    rstd: Tensor,
    act: str,
    rate: Tensor | None,
    clock: Tensor | None,
    site: int,
    parts: int = 1,
) -> tuple[Tensor, Tensor]:
    """Gradients to ``x``, and to weight, shift and (where there is one) b ``[..., 2 or 3, F]``.

    The split of rows does not depend on the number of tasks, so that each has the sums it has alone.
    """
    tasks, N, F = _sizes(x, weight)
    grad, x, sums = grad.contiguous(), x.contiguous(), 2 if b is None else 3
    grad_x = torch.empty_like(x)
    shape = *weight.shape[:-1], sums, F
    if not x.numel():
        return grad_x, mean.new_zeros(shape)
    constants = _constants(x, b, act, rate, parts)
    block_n = constants["BN"]
    rows = block_n * -(-N // (block_n * limits_of(x.device).programs(4)))
    programs = -(-N // rows)
    partial = x.new_empty(tasks, programs, sums * F, dtype=mean.dtype)
    rates, clocks, *strides = drop_arguments(rate, clock, tasks, x)
    _backward_kernel[(programs, tasks)](
        grad, x, x if b is None else b.contiguous(), weight.contiguous(), shift.contiguous(),
        mean.contiguous(), rstd.contiguous(), rates, clocks, grad_x, partial, N, rows, site, *strides, **constants,
    )  # fmt: skip
    return grad_x, add_parts(partial, (sums * F, 0), mean.dtype)[0].reshape(shape)
