"""Bias, layer norm, activation and counter-based dropout in one pass over the rows.

    out[n, f] = keep / (1 - rate) * act((x[n, f] + b[f] - mean[n]) * rstd[n] * weight[f] + shift[f])

mean and rstd = 1 / sqrt(variance + eps) are those of the F numbers ``x[n] + b``. Only they and the inputs are saved for
the backward pass: it recomputes the activation's input, and draws the mask again (``random_bits.py``). ``parts`` as in
``bias_act_dropout.py``.

Shapes: T tasks, N rows, F features; ``b``, ``weight`` and ``shift [..., F]``, ``clock [..., 2]`` and ``rate [...]``
have the leading dimensions of a task. All other dimensions of ``x`` but the last are rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.ops.dense.bias_act_dropout import bias_act_dropout_backward_torch, bias_act_dropout_torch
from weft.ops.dense.norm_epilogue import EPILOGUE, TILE, Epilogue, checked_epilogue, end, end_backward, ranges, setup
from weft.ops.dense.tiles_triton import add_parts
from weft.ops.launch.backend import accumulate_dtype, batch_tasks, custom_op, next_power_of_2, use_triton
from weft.ops.launch.triton_lang import tl, triton, triton_acc
from weft.ops.random_bits_triton import drop_key

# ---- Triton kernels: a tile holds whole rows, so that each direction is one pass

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


def _constants(x: Tensor, b: Tensor | None, epilogue: Epilogue) -> dict:
    F = x.shape[-1]
    block_f = next_power_of_2(F)
    tile = {"BN": max(1, min(MOST_ROWS, TILE // block_f)), "BF": block_f, "num_warps": 4}
    return {"F": F, "HAS_B": b is not None, "ACC": triton_acc(x.dtype), **epilogue.constants(F), **tile}


def layer_norm_triton(
    x: Tensor, b: Tensor | None, weight: Tensor, shift: Tensor, eps: float, *epilogue: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, mean, rstd)``, shaped like ``x [..., N, F]`` and its rows."""
    x, ending, tasks = x.contiguous(), Epilogue(*epilogue), weight.shape[:-1].numel()
    out = torch.empty_like(x)
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=accumulate_dtype(x.dtype)) for _ in range(2))
    if x.numel():
        N, constants = x.numel() // (tasks * x.shape[-1]), _constants(x, b, ending)
        rates, clocks, *strides = ending.arguments(tasks, x)
        _forward_kernel[(-(-N // constants["BN"]), tasks)](
            x, x if b is None else b.contiguous(), weight.contiguous(), shift.contiguous(), rates, clocks,
            out, mean, rstd, N, eps, ending.site, *strides, **constants,
        )  # fmt: skip
    return out, mean, rstd


def layer_norm_backward_triton(
    grad: Tensor, x: Tensor, b: Tensor | None, weight: Tensor, shift: Tensor, mean: Tensor, rstd: Tensor, *epilogue: Any
) -> tuple[Tensor, Tensor]:
    """Gradients to ``x``, and to weight, shift and (where there is one) b ``[..., 2 or 3, F]``.

    The split of rows does not depend on the number of tasks, so that each has the sums it has alone.
    """
    ending, tasks, F = Epilogue(*epilogue), weight.shape[:-1].numel(), x.shape[-1]
    grad, x, sums = grad.contiguous(), x.contiguous(), 2 if b is None else 3
    grad_x = torch.empty_like(x)
    shape = *weight.shape[:-1], sums, F
    if not x.numel():
        return grad_x, mean.new_zeros(shape)
    constants, N = _constants(x, b, ending), x.numel() // (tasks * F)
    rows, programs = ranges(N, constants["BN"], x.device)
    partial = x.new_empty(tasks, programs, sums * F, dtype=mean.dtype)
    rates, clocks, *strides = ending.arguments(tasks, x)
    _backward_kernel[(programs, tasks)](
        grad, x, x if b is None else b.contiguous(), weight.contiguous(), shift.contiguous(),
        mean.contiguous(), rstd.contiguous(), rates, clocks, grad_x, partial, N, rows, ending.site,
        *strides, **constants,
    )  # fmt: skip
    return grad_x, add_parts(partial, (sums * F, 0), mean.dtype)[0].reshape(shape)


def _columns(value: Tensor, x: Tensor) -> Tensor:
    """``value [..., F]`` so that it broadcasts against ``x [..., N, F]``, in the accumulation type."""
    ones = (1,) * (x.dim() - value.dim())
    return value.reshape(*value.shape[:-1], *ones, value.shape[-1]).to(accumulate_dtype(x.dtype))


def _moved(x: Tensor, b: Tensor | None) -> Tensor:
    wide = x.to(accumulate_dtype(x.dtype))
    return wide if b is None else wide + _columns(b, x)


def layer_norm_torch(
    x: Tensor, b: Tensor | None, weight: Tensor, shift: Tensor, eps: float, *epilogue: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference: ``(out, mean, rstd)``."""
    moved = _moved(x, b)
    mean = moved.mean(-1)
    away = moved - mean[..., None]
    rstd = (away.square().mean(-1) + eps).rsqrt()
    normal = away * rstd[..., None]
    value = normal * _columns(weight, x) + _columns(shift, x)
    return bias_act_dropout_torch(value, None, *Epilogue(*epilogue)).to(x.dtype), mean, rstd


def layer_norm_backward_torch(
    grad: Tensor, x: Tensor, b: Tensor | None, weight: Tensor, shift: Tensor, mean: Tensor, rstd: Tensor, *epilogue: Any
) -> tuple[Tensor, Tensor]:
    """Reference: the gradient to ``x``, and those to weight, shift and (where there is one) b ``[..., 2 or 3, F]``."""
    normal = (_moved(x, b) - mean[..., None]) * rstd[..., None]
    scale, ending = _columns(weight, x), Epilogue(*epilogue)
    out = bias_act_dropout_torch(normal * scale + _columns(shift, x), None, *ending)
    slope = bias_act_dropout_backward_torch(grad.to(out.dtype), out, *ending)
    inner = slope * scale
    inner = inner - inner.mean(-1, keepdim=True) - normal * (inner * normal).mean(-1, keepdim=True)
    grad_x = inner * rstd[..., None]
    terms = (slope * normal, slope) if b is None else (slope * normal, slope, grad_x)
    lead, F = weight.shape[:-1], weight.shape[-1]
    rows = x.shape[len(lead) : -1].numel()
    return grad_x.to(x.dtype), torch.stack([term.reshape(*lead, rows, F).sum(-2) for term in terms], -2)


def _serves(x: Tensor) -> bool:
    return use_triton(x) and x.shape[-1] <= WIDEST


@custom_op(
    "weft::layer_norm_act_dropout",
    f"(Tensor x, Tensor? b, Tensor weight, Tensor shift, float eps, {EPILOGUE}) -> (Tensor, Tensor, Tensor)",
)
def _op(x, b, weight, shift, eps, *epilogue):
    serve = layer_norm_triton if _serves(x) else layer_norm_torch
    return serve(x, b, weight, shift, eps, *epilogue)


@custom_op(
    "weft::layer_norm_act_dropout_backward",
    "(Tensor grad, Tensor x, Tensor? b, Tensor weight, Tensor shift, Tensor mean, Tensor rstd, "
    f"{EPILOGUE}) -> (Tensor, Tensor)",
)
def _backward_op(grad, x, b, weight, shift, mean, rstd, *epilogue):
    serve = layer_norm_backward_triton if _serves(x) else layer_norm_backward_torch
    return serve(grad, x, b, weight, shift, mean, rstd, *epilogue)


@_op.register_fake
def _fake(x, b, weight, shift, eps, *epilogue):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, *(x.new_empty(x.shape[:-1], dtype=accumulate_dtype(x.dtype)) for _ in range(2))


@_backward_op.register_fake
def _backward_fake(grad, x, b, weight, shift, mean, rstd, *epilogue):
    sums = mean.new_empty(*weight.shape[:-1], 2 if b is None else 3, weight.shape[-1])
    return torch.empty_like(x, memory_format=torch.contiguous_format), sums


def _backward(ctx, grad, *_):
    if grad is None:
        return (None,) * 10
    *tensors, rate, clock = ctx.saved_tensors
    _, b, weight, shift, *_ = tensors
    grad_x, sums = _backward_op(grad.contiguous(), *tensors, ctx.act, rate, clock, ctx.site, ctx.parts)
    grad_weight, grad_shift, *grad_b = sums.unbind(-2)
    to_b = None if b is None else grad_b[0].to(b.dtype)
    return grad_x, to_b, grad_weight.to(weight.dtype), grad_shift.to(shift.dtype), *(None,) * 6


_op.register_autograd(_backward, setup_context=setup)
batch_tasks(_op)
batch_tasks(_backward_op, contiguous=(0,))


def layer_norm_act_dropout(
    x: Tensor, b: Tensor | None, weight: Tensor, shift: Tensor, eps: float = 1e-5, *then: Any, **named: Any
) -> Tensor:
    """``dropout(act(norm(x + b)))`` over the rows of ``x [..., N, F]``, in one pass on a GPU up to 1,024 features.

    ``then``: ``act``, ``p``, ``clock``, ``site`` and ``parts`` of
    :func:`~weft.ops.dense.bias_act_dropout.bias_act_dropout`, in this order or by name.
    """
    columns = (weight, shift) if b is None else (weight, shift, b)
    ending = checked_epilogue("layer_norm_act_dropout", x, weight.dim() - 1, columns, *then, **named)
    return _op(x, b, weight, shift, eps, *ending)[0]
