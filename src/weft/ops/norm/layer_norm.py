"""Bias, layer norm, activation and counter-based dropout in one pass over the rows.

    out[n, f] = keep / (1 - rate) * act((x[n, f] + b[f] - mean[n]) * rstd[n] * weight[f] + shift[f])

mean and rstd = 1 / sqrt(variance + eps) are those of the F numbers ``x[n] + b``. Only they and the inputs are saved for
the backward pass: it recomputes the activation's input, and draws the mask again (``torch_bits.py``). ``parts`` as in
``bias_act_dropout.py``.

Shapes: T tasks, N rows, F features; ``b``, ``weight`` and ``shift [..., F]``, ``clock [..., 2]`` and ``rate [...]``
have the leading dimensions of a task. All other dimensions of ``x`` but the last are rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.ops.dense.bias_act_dropout import bias_act_dropout_backward_torch, bias_act_dropout_torch
from weft.ops.launch.backend import accumulate_dtype, custom_op, use_triton
from weft.ops.norm.act_dropout import ENDING, NO_ENDING, as_ending, check_columns, lead_tasks
from weft.ops.norm.layer_norm_triton import WIDEST, layer_norm_backward_triton, layer_norm_triton


def _columns(value: Tensor, x: Tensor) -> Tensor:
    """``value [..., F]`` so that it broadcasts against ``x [..., N, F]``, in the accumulation type."""
    ones = (1,) * (x.dim() - value.dim())
    return value.reshape(*value.shape[:-1], *ones, value.shape[-1]).to(accumulate_dtype(x.dtype))


def _moved(x: Tensor, b: Tensor | None) -> Tensor:
    wide = x.to(accumulate_dtype(x.dtype))
    return wide if b is None else wide + _columns(b, x)


def layer_norm_torch(
    x: Tensor,
    b: Tensor | None,
    weight: Tensor,
    shift: Tensor,
    eps: float,
    *ending: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference: ``(out, mean, rstd)``."""
    moved = _moved(x, b)
    mean = moved.mean(-1)
    away = moved - mean[..., None]
    rstd = (away.square().mean(-1) + eps).rsqrt()
    normal = away * rstd[..., None]
    value = normal * _columns(weight, x) + _columns(shift, x)
    return bias_act_dropout_torch(value, None, *(ending or NO_ENDING)).to(x.dtype), mean, rstd


def layer_norm_backward_torch(
    grad: Tensor,
    x: Tensor,
    b: Tensor | None,
    weight: Tensor,
    shift: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *ending: Any,
) -> tuple[Tensor, Tensor]:
    """Reference: the gradient to ``x``, and those to weight, shift and (where there is one) b ``[..., 2 or 3, F]``."""
    normal = (_moved(x, b) - mean[..., None]) * rstd[..., None]
    scale, ending = _columns(weight, x), ending or NO_ENDING
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
    mutates_args=(),
    schema=f"(Tensor x, Tensor? b, Tensor weight, Tensor shift, float eps, {ENDING}) -> (Tensor, Tensor, Tensor)",
)
def _op(x, b, weight, shift, eps, act, rate, clock, site, parts=1):
    serve = layer_norm_triton if _serves(x) else layer_norm_torch
    return serve(x, b, weight, shift, eps, act, rate, clock, site, parts)


@custom_op(
    "weft::layer_norm_act_dropout_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor? b, Tensor weight, Tensor shift, Tensor mean, Tensor rstd, "
    f"{ENDING}) -> (Tensor, Tensor)",
)
def _backward_op(grad, x, b, weight, shift, mean, rstd, act, rate, clock, site, parts=1):
    serve = layer_norm_backward_triton if _serves(x) else layer_norm_backward_torch
    return serve(grad, x, b, weight, shift, mean, rstd, act, rate, clock, site, parts)


@_op.register_fake
def _fake(x, b, weight, shift, eps, act, rate, clock, site, parts=1):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, *(x.new_empty(x.shape[:-1], dtype=accumulate_dtype(x.dtype)) for _ in range(2))


@_backward_op.register_fake
def _backward_fake(grad, x, b, weight, shift, mean, rstd, act, rate, clock, site, parts=1):
    sums = mean.new_empty(*weight.shape[:-1], 2 if b is None else 3, weight.shape[-1])
    return torch.empty_like(x, memory_format=torch.contiguous_format), sums


def _setup(ctx, inputs, output):
    x, b, weight, shift, _, ctx.act, rate, clock, ctx.site, ctx.parts = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, b, weight, shift, mean, rstd, rate, clock)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, *_):
    if grad is None:
        return (None,) * 10
    *given, rate, clock = ctx.saved_tensors
    _, b, weight, shift, *_ = given
    grad_x, sums = _backward_op(grad.contiguous(), *given, ctx.act, rate, clock, ctx.site, ctx.parts)
    grad_weight, grad_shift, *grad_b = sums.unbind(-2)
    to_b = None if b is None else grad_b[0].to(b.dtype)
    return grad_x, to_b, grad_weight.to(weight.dtype), grad_shift.to(shift.dtype), *(None,) * 6


_op.register_autograd(_backward, setup_context=_setup)


@_op.register_vmap
def _vmap(info, in_dims, *arguments):
    return _op(*lead_tasks(info.batch_size, in_dims, arguments)), (0, 0, 0)


@_backward_op.register_vmap
def _backward_vmap(info, in_dims, *arguments):
    grad, *others = lead_tasks(info.batch_size, in_dims, arguments)
    return _backward_op(grad.contiguous(), *others), (0, 0)


def layer_norm_act_dropout(
    x: Tensor,
    b: Tensor | None,
    weight: Tensor,
    shift: Tensor,
    eps: float = 1e-5,
    act: str = "none",
    p: float | Tensor = 0.0,
    clock: Tensor | None = None,
    site: int = 0,
    parts: int = 1,
) -> Tensor:
    """``dropout(act(norm(x + b)))`` over the rows of ``x [..., N, F]``, in one pass on a GPU up to 1,024 features.

    ``act``, ``p``, ``clock``, ``site`` and ``parts`` are those of
    :func:`~weft.ops.dense.bias_act_dropout.bias_act_dropout`.
    """
    check_columns("layer_norm_act_dropout", x, weight.dim() - 1, weight, shift, *(() if b is None else (b,)))
    ending = as_ending("layer_norm_act_dropout", weight, act, p, clock, site, parts)
    return _op(x, b, weight, shift, eps, *ending)[0]
