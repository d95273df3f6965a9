"""Batch norm, activation and counter-based dropout: every column to mean 0 and variance 1 over the rows of its task.

    out[n, f] = keep / (1 - rate) * act((x[n, f] - mean[f]) / sqrt(var[f] + eps) * weight[f] + bias[f])

On a GPU the moments take one pass over ``x`` and everything else another; backward there are two passes over ``x`` and
the gradient. Only ``x`` and the moments are saved for it: the activation's input is recomputed, and the mask is drawn
again (``random_bits.py``). Torch's kernels need the columns of T tasks side by side, ``[N, T F]``, and under ``vmap``
they copy the activations there and back; its variances take up to eight times the input in buffers of their own.
``parts`` is as in ``bias_act_dropout.py``.

Shapes: T tasks, N rows, F features; ``clock [..., 2]`` and ``rate [...]`` have the leading dimensions of a task.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.ops.dense.bias_act_dropout import bias_act_dropout_backward_torch, bias_act_dropout_torch
from weft.ops.dense.norm_epilogue import EPILOGUE, TILE, Epilogue, checked_epilogue, end, end_backward, ranges, setup
from weft.ops.dense.tiles_triton import add_parts
from weft.ops.launch.backend import accumulate_dtype, batch_tasks, by_device, custom_op, next_power_of_2
from weft.ops.launch.triton_lang import tl, triton, triton_acc
from weft.ops.random_bits_triton import drop_key

# ---- Triton kernels: the columns' moments, the pass that uses them, and the two of the backward
#
# Every program takes a range of rows of some columns; the partial sums of ranges are added in a fixed order. The
# split into ranges does not depend on the number of tasks, so that each has the sums it has alone.


@triton.jit
def _moments_kernel(
    x, partial, N, rows_per_program,
    F: tl.constexpr, ACC: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Mean, and sum of squares about it, of the columns of a range of rows.

    Each lane moves a mean of its own along (Welford), and lanes are merged at the end (Chan), all of it less the
    column's first value: so nothing cancels where a column's mean is large and its deviation small.
    """
    part = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    in_f = f < F
    origin = tl.load(x + task * N * F + f, mask=in_f, other=0.0).to(ACC)
    first = part * rows_per_program
    last = tl.minimum(first + rows_per_program, N)
    seen = tl.full([], 0.0, ACC)
    mean = tl.zeros([BN, BF], ACC)
    spread = tl.zeros([BN, BF], ACC)
    for base in range(first, last, BN):
        n = base + tl.arange(0, BN)
        mask = (n < last)[:, None] & in_f[None, :]
        at = (task * N + n)[:, None] * F + f[None, :]
        value = tl.load(x + at, mask=mask, other=0.0).to(ACC) - origin[None, :]
        seen += 1.0
        away = tl.where(mask, value - mean, 0.0)
        mean += away * (1.0 / seen)
        spread += away * (value - mean)
    lane = tl.arange(0, BN)
    count = ((tl.maximum(last - first - lane, 0) + BN - 1) // BN).to(ACC)[:, None]  # rows that each lane has seen
    centre = tl.sum(mean * count, 0) / (last - first)
    away = mean - centre[None, :]
    into = partial + (task * tl.num_programs(0) + part) * 2 * F + f
    tl.store(into, centre, mask=in_f)
    tl.store(into + F, tl.sum(spread + away * away * count, 0), mask=in_f)


@triton.jit
def _merge_kernel(
    x, partial, mean, var, N, rows_per_program, parts,
    F: tl.constexpr, ACC: tl.constexpr, BP: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Merge the moments of all ranges: first the mean, then the squares about it."""
    task = tl.program_id(1).to(tl.int64)
    f = tl.program_id(0) * BF + tl.arange(0, BF)
    in_f = f < F
    total = tl.zeros([BP, BF], ACC)
    for base in range(0, parts, BP):
        p = base + tl.arange(0, BP)
        mask = (p < parts)[:, None] & in_f[None, :]
        count = tl.minimum(N - p * rows_per_program, rows_per_program).to(ACC)[:, None]
        at = (task * parts + p)[:, None] * 2 * F + f[None, :]
        total += count * tl.load(partial + at, mask=mask, other=0.0)
    centre = tl.sum(total, 0) / N
    spread = tl.zeros([BP, BF], ACC)
    for base in range(0, parts, BP):
        p = base + tl.arange(0, BP)
        mask = (p < parts)[:, None] & in_f[None, :]
        count = tl.minimum(N - p * rows_per_program, rows_per_program).to(ACC)[:, None]
        at = (task * parts + p)[:, None] * 2 * F + f[None, :]
        away = tl.load(partial + at, mask=mask, other=0.0) - centre[None, :]
        spread += tl.where(mask, tl.load(partial + at + F, mask=mask, other=0.0) + away * away * count, 0.0)
    origin = tl.load(x + task * N * F + f, mask=in_f, other=0.0).to(ACC)
    tl.store(mean + task * F + f, origin + centre, mask=in_f)
    tl.store(var + task * F + f, tl.sum(spread, 0) / N, mask=in_f)


@triton.jit
def _columns(mean, var, weight, bias, eps, task, f, F: tl.constexpr, ACC: tl.constexpr):
    """Centre, 1 / deviation, scale and shift of the columns ``f``."""
    in_f = f < F
    centre = tl.load(mean + task * F + f, mask=in_f, other=0.0).to(ACC)[None, :]
    deviation = 1.0 / tl.sqrt(tl.load(var + task * F + f, mask=in_f, other=1.0).to(ACC) + eps)[None, :]
    scale = tl.load(weight + task * F + f, mask=in_f, other=0.0).to(ACC)[None, :]
    move = tl.load(bias + task * F + f, mask=in_f, other=0.0).to(ACC)[None, :]
    return centre, deviation, scale, move


@triton.jit
def _apply_kernel(
    x, mean, var, weight, bias, rate, clock, out, N, eps, site, stride_rate, stride_clock,
    F: tl.constexpr, W: tl.constexpr, ACT: tl.constexpr, DROP: tl.constexpr,
    ACC: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    task = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    centre, deviation, scale, move = _columns(mean, var, weight, bias, eps, task, f, F, ACC)
    key, fraction = drop_key(clock, rate, task, site, stride_clock, stride_rate, DROP)
    mask = (n < N)[:, None] & (f < F)[None, :]
    at = (task * N + n)[:, None] * F + f[None, :]
    normal = (tl.load(x + at, mask=mask, other=0.0).to(ACC) - centre) * deviation
    # Rounded once, here and in the backward pass: both must see the same sign.
    value = end(tl.fma(normal, scale, move), key, fraction, n, f, F, W, ACT, DROP)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sums_kernel(
    grad, x, mean, var, weight, bias, rate, clock, partial, N, rows_per_program, eps, site, stride_rate, stride_clock,
    F: tl.constexpr, W: tl.constexpr, ACT: tl.constexpr, DROP: tl.constexpr,
    ACC: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """``sum of slope * normalised x`` and ``sum of slope`` over a range of rows, the slope behind the activation."""
    part = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    in_f = f < F
    centre, deviation, scale, move = _columns(mean, var, weight, bias, eps, task, f, F, ACC)
    key, fraction = drop_key(clock, rate, task, site, stride_clock, stride_rate, DROP)
    first = part * rows_per_program
    last = tl.minimum(first + rows_per_program, N)
    total = tl.zeros([BN, BF], ACC)
    product = tl.zeros([BN, BF], ACC)
    for base in range(first, last, BN):
        n = (base + tl.arange(0, BN)).to(tl.int64)
        mask = (n < last)[:, None] & in_f[None, :]
        at = (task * N + n)[:, None] * F + f[None, :]
        slope = tl.load(grad + at, mask=mask, other=0.0).to(ACC)
        normal = (tl.load(x + at, mask=mask, other=0.0).to(ACC) - centre) * deviation
        slope = end_backward(slope, tl.fma(normal, scale, move), key, fraction, n, f, F, W, ACT, DROP)
        total += slope
        product += slope * normal
    into = partial + (task * tl.num_programs(0) + part) * 2 * F + f
    tl.store(into, tl.sum(product, 0), mask=in_f)
    tl.store(into + F, tl.sum(total, 0), mask=in_f)


@triton.jit
def _gradient_kernel(
    grad, x, mean, var, weight, bias, rate, clock, sums, grad_x, N, eps, site, stride_rate, stride_clock,
    F: tl.constexpr, W: tl.constexpr, ACT: tl.constexpr, DROP: tl.constexpr,
    ACC: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    task = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    in_f = f < F
    centre, deviation, scale, move = _columns(mean, var, weight, bias, eps, task, f, F, ACC)
    key, fraction = drop_key(clock, rate, task, site, stride_clock, stride_rate, DROP)
    along = tl.load(sums + task * 2 * F + f, mask=in_f, other=0.0).to(ACC) / N
    level = tl.load(sums + (task * 2 + 1) * F + f, mask=in_f, other=0.0).to(ACC) / N
    mask = (n < N)[:, None] & in_f[None, :]
    at = (task * N + n)[:, None] * F + f[None, :]
    slope = tl.load(grad + at, mask=mask, other=0.0).to(ACC)
    normal = (tl.load(x + at, mask=mask, other=0.0).to(ACC) - centre) * deviation
    slope = end_backward(slope, tl.fma(normal, scale, move), key, fraction, n, f, F, W, ACT, DROP)
    value = (slope - level[None, :] - normal * along[None, :]) * (scale * deviation)
    tl.store(grad_x + at, value.to(grad_x.dtype.element_ty), mask=mask)


def _tile(x: Tensor) -> dict:
    block_f = min(128, next_power_of_2(x.shape[-1]))
    return {"F": x.shape[-1], "ACC": triton_acc(x.dtype), "BN": TILE // block_f, "BF": block_f, "num_warps": 4}


def moments_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance ``[..., F]`` of the columns of a contiguous ``x [..., N, F]``."""
    lead, (N, F) = x.shape[:-2], x.shape[-2:]
    tasks, tile = lead.numel(), _tile(x)
    rows, parts = ranges(N, tile["BN"], x.device)
    partial = x.new_empty(tasks, parts, 2, F, dtype=accumulate_dtype(x.dtype))
    mean, var = (partial.new_empty(*lead, F) for _ in range(2))
    _moments_kernel[(parts, -(-F // tile["BF"]), tasks)](x, partial, N, rows, **tile)
    block_p = min(128, max(16, next_power_of_2(parts)))
    _merge_kernel[(-(-F // 16), tasks)](
        x, partial, mean, var, N, rows, parts, F=F, ACC=tile["ACC"], BP=block_p, BF=16, num_warps=4
    )
    return mean, var


def normalise_triton(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, eps: float, *epilogue: Any
) -> Tensor:
    """``dropout(act((x - mean) / sqrt(var + eps) * weight + bias))`` of ``x [..., N, F]`` by columns ``[..., F]``."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if not x.numel():
        return out
    ending, tasks, F, tile = Epilogue(*epilogue), weight.shape[:-1].numel(), x.shape[-1], _tile(x)
    N = x.numel() // (tasks * F)
    columns = [value.contiguous() for value in (mean, var, weight, bias)]
    rates, clocks, *strides = ending.arguments(tasks, x)
    _apply_kernel[(-(-N // tile["BN"]), -(-F // tile["BF"]), tasks)](
        x, *columns, rates, clocks, out, N, eps, ending.site, *strides, **ending.constants(F), **tile
    )
    return out


def batch_norm_triton(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, *epilogue: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, mean, var)`` of ``x [..., N, F]``: one pass for the moments, one for everything else."""
    x = x.contiguous()
    if x.numel():
        mean, var = moments_triton(x)
    else:
        mean, var = (x.new_zeros(weight.shape, dtype=accumulate_dtype(x.dtype)) for _ in range(2))
    return normalise_triton(x, mean, var, weight, bias, eps, *epilogue), mean, var


def batch_norm_backward_triton(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float, *epilogue: Any
) -> tuple[Tensor, Tensor]:
    """Gradients to ``x [..., N, F]``, and to weight and bias ``[..., 2, F]``."""
    lead, (N, F) = x.shape[:-2], x.shape[-2:]
    grad, x = grad.contiguous(), x.contiguous()
    grad_x = torch.empty_like(x)
    if not x.numel():
        return grad_x, mean.new_zeros(*lead, 2, F)
    ending, tasks, tile = Epilogue(*epilogue), lead.numel(), _tile(x)
    rows, programs = ranges(N, tile["BN"], x.device)
    columns = [value.contiguous() for value in (mean, var, weight, bias)]
    rates, clocks, *strides = ending.arguments(tasks, x)
    constants = {**ending.constants(F), **tile}
    tiles = -(-F // tile["BF"])
    partial = x.new_empty(tasks, programs, 2 * F, dtype=mean.dtype)
    _sums_kernel[(programs, tiles, tasks)](
        grad, x, *columns, rates, clocks, partial, N, rows, eps, ending.site, *strides, **constants
    )
    sums = add_parts(partial, (2 * F, 0), mean.dtype)[0]
    _gradient_kernel[(-(-N // tile["BN"]), tiles, tasks)](
        grad, x, *columns, rates, clocks, sums, grad_x, N, eps, ending.site, *strides, **constants
    )
    return grad_x, sums.reshape(*lead, 2, F)


def batch_norm_torch(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, *epilogue: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference: ``(out, mean, var)``; the variance is the biased one."""
    var, mean = torch.var_mean(x.to(accumulate_dtype(x.dtype)), -2, correction=0)
    return normalise_torch(x, mean, var, weight, bias, eps, *epilogue), mean, var


def normalise_torch(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, eps: float, *epilogue: Any
) -> Tensor:
    """Reference: everything that follows the moments."""
    out = _before(x, mean, var, weight, bias, eps)
    return bias_act_dropout_torch(out, None, *Epilogue(*epilogue)).to(x.dtype).contiguous()


def _before(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The activation's input, in the accumulation type."""
    scale = weight * (var + eps).rsqrt()
    shift = bias - mean * scale
    return torch.addcmul(shift.unsqueeze(-2), x, scale.unsqueeze(-2))


def batch_norm_backward_torch(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float, *epilogue: Any
) -> tuple[Tensor, Tensor]:
    """Reference: the gradient to ``x``, and those to ``weight`` and ``bias`` side by side ``[..., 2, F]``."""
    acc = accumulate_dtype(x.dtype)
    deviation = (var + eps).rsqrt()
    slope, normal = grad.to(acc), (x.to(acc) - mean.unsqueeze(-2)) * deviation.unsqueeze(-2)
    act, rate = Epilogue(*epilogue)[:2]
    if act != "none" or rate is not None:
        out = bias_act_dropout_torch(_before(x, mean, var, weight, bias, eps).to(acc), None, *epilogue)
        slope = bias_act_dropout_backward_torch(slope, out, *epilogue)
    grad_bias, grad_weight = slope.sum(-2), (slope * normal).sum(-2)
    rows = max(x.shape[-2], 1)
    centred = slope - (grad_bias / rows).unsqueeze(-2) - normal * (grad_weight / rows).unsqueeze(-2)
    return (centred * (weight * deviation).unsqueeze(-2)).to(x.dtype), torch.stack([grad_weight, grad_bias], -2)


_op = custom_op(
    "weft::batch_norm_act_dropout",
    f"(Tensor x, Tensor weight, Tensor bias, float eps, {EPILOGUE}) -> (Tensor, Tensor, Tensor)",
)(by_device(batch_norm_triton, batch_norm_torch))
_backward_op = custom_op(
    "weft::batch_norm_act_dropout_backward",
    "(Tensor grad, Tensor x, Tensor weight, Tensor bias, Tensor mean, Tensor var, float eps, "
    f"{EPILOGUE}) -> (Tensor, Tensor)",
)(by_device(batch_norm_backward_triton, batch_norm_backward_torch))
_normalise_op = custom_op(
    "weft::normalise_act_dropout",
    f"(Tensor x, Tensor mean, Tensor var, Tensor weight, Tensor bias, float eps, {EPILOGUE}) -> Tensor",
)(by_device(normalise_triton, normalise_torch))


@_op.register_fake
def _fake(x, weight, bias, eps, *epilogue):
    shape = (*x.shape[:-2], x.shape[-1])
    acc = accumulate_dtype(x.dtype)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, x.new_empty(shape, dtype=acc), x.new_empty(shape, dtype=acc)


@_backward_op.register_fake
def _backward_fake(grad, x, weight, bias, mean, var, eps, *epilogue):
    sums = mean.new_empty(*mean.shape[:-1], 2, mean.shape[-1])
    return torch.empty_like(x, memory_format=torch.contiguous_format), sums


def _backward(ctx, grad, *_):
    if grad is None:
        return (None,) * 9
    *tensors, rate, clock = ctx.saved_tensors
    _, weight, bias, *_ = tensors
    grad_x, sums = _backward_op(grad.contiguous(), *tensors, ctx.eps, ctx.act, rate, clock, ctx.site, ctx.parts)
    grad_weight, grad_bias = sums.unbind(-2)
    return grad_x, grad_weight.to(weight.dtype), grad_bias.to(bias.dtype), *(None,) * 6


_op.register_autograd(_backward, setup_context=setup)
batch_tasks(_op)
batch_tasks(_backward_op, contiguous=range(12))
batch_tasks(_normalise_op, like=(0,))


def batch_norm_act_dropout(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, *then: Any, **named: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """``dropout(act(norm(x)))`` of ``x [..., N, F]`` by its own columns, with ``weight`` and ``bias [..., F]``.

    Returns ``(out [..., N, F], mean [..., F], var [..., F])``; the variance is the biased one. Only ``out`` is
    differentiable. ``then``: ``act``, ``p``, ``clock``, ``site`` and ``parts`` of
    :func:`~weft.ops.dense.bias_act_dropout.bias_act_dropout`, in this order or by name.
    """
    ending = checked_epilogue("batch_norm_act_dropout", x, x.dim() - 2, (weight, bias), *then, **named)
    return _op(x, weight, bias, eps, *ending)


def normalise_act_dropout(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, *then: Any, **named: Any
) -> Tensor:
    """The same with given ``mean`` and ``var [..., F]``. Not differentiable: it serves evaluation."""
    columns = mean, var, weight, bias
    ending = checked_epilogue("normalise_act_dropout", x, weight.dim() - 1, columns, *then, **named)
    return _normalise_op(x, *columns, eps, *ending)
