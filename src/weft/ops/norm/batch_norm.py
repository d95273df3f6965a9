"""Batch norm, activation and counter-based dropout: every column to mean 0 and variance 1 over the rows of its task.

    out[n, f] = keep / (1 - rate) * act((x[n, f] - mean[f]) / sqrt(var[f] + eps) * weight[f] + bias[f])

On a GPU the moments take one pass over ``x`` and everything else another; backward there are two passes over ``x`` and
the gradient. Only ``x`` and the moments are saved for it: the activation's input is recomputed, and the mask is drawn
again (``torch_bits.py``). Torch's kernels need the columns of T tasks side by side, ``[N, T F]``, and under ``vmap``
they copy the activations there and back; its variances take up to eight times the input in buffers of their own.
``parts`` is as in ``bias_act_dropout.py``.

Shapes: T tasks, N rows, F features; ``clock [..., 2]`` and ``rate [...]`` have the leading dimensions of a task.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.ops.dense.bias_act_dropout import bias_act_dropout_backward_torch, bias_act_dropout_torch
from weft.ops.launch.backend import accumulate_dtype, custom_op, use_triton
from weft.ops.norm.act_dropout import ENDING, NO_ENDING, as_ending, check_columns, lead_tasks
from weft.ops.norm.batch_norm_triton import batch_norm_backward_triton, batch_norm_triton, normalise_triton


def batch_norm_torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *ending: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference: ``(out, mean, var)``; the variance is the biased one."""
    var, mean = torch.var_mean(x.to(accumulate_dtype(x.dtype)), -2, correction=0)
    return normalise_torch(x, mean, var, weight, bias, eps, *ending), mean, var


def normalise_torch(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *ending: Any,
) -> Tensor:
    """Reference: everything that follows the moments."""
    out = _before(x, mean, var, weight, bias, eps)
    return bias_act_dropout_torch(out, None, *(ending or NO_ENDING)).to(x.dtype).contiguous()


def _before(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The activation's input, in the accumulation type."""
    scale = weight * (var + eps).rsqrt()
    shift = bias - mean * scale
    return torch.addcmul(shift.unsqueeze(-2), x, scale.unsqueeze(-2))


def batch_norm_backward_torch(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    eps: float,
    *ending: Any,
) -> tuple[Tensor, Tensor]:
    """Reference: the gradient to ``x``, and those to ``weight`` and ``bias`` side by side ``[..., 2, F]``."""
    acc = accumulate_dtype(x.dtype)
    deviation = (var + eps).rsqrt()
    slope, normal = grad.to(acc), (x.to(acc) - mean.unsqueeze(-2)) * deviation.unsqueeze(-2)
    act, rate = (ending or NO_ENDING)[:2]
    if act != "none" or rate is not None:
        out = bias_act_dropout_torch(_before(x, mean, var, weight, bias, eps).to(acc), None, *ending)
        slope = bias_act_dropout_backward_torch(slope, out, *ending)
    grad_bias, grad_weight = slope.sum(-2), (slope * normal).sum(-2)
    rows = max(x.shape[-2], 1)
    centred = slope - (grad_bias / rows).unsqueeze(-2) - normal * (grad_weight / rows).unsqueeze(-2)
    return (centred * (weight * deviation).unsqueeze(-2)).to(x.dtype), torch.stack([grad_weight, grad_bias], -2)


@custom_op(
    "weft::batch_norm_act_dropout",
    mutates_args=(),
    schema=f"(Tensor x, Tensor weight, Tensor bias, float eps, {ENDING}) -> (Tensor, Tensor, Tensor)",
)
def _op(x, weight, bias, eps, act, rate, clock, site, parts=1):
    serve = batch_norm_triton if use_triton(x) else batch_norm_torch
    return serve(x, weight, bias, eps, act, rate, clock, site, parts)


@custom_op(
    "weft::batch_norm_act_dropout_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor weight, Tensor bias, Tensor mean, Tensor var, float eps, "
    f"{ENDING}) -> (Tensor, Tensor)",
)
def _backward_op(grad, x, weight, bias, mean, var, eps, act, rate, clock, site, parts=1):
    serve = batch_norm_backward_triton if use_triton(x) else batch_norm_backward_torch
    return serve(grad, x, weight, bias, mean, var, eps, act, rate, clock, site, parts)


@custom_op(
    "weft::normalise_act_dropout",
    mutates_args=(),
    schema=f"(Tensor x, Tensor mean, Tensor var, Tensor weight, Tensor bias, float eps, {ENDING}) -> Tensor",
)
def _normalise_op(x, mean, var, weight, bias, eps, act, rate, clock, site, parts=1):
    serve = normalise_triton if use_triton(x) else normalise_torch
    return serve(x, mean, var, weight, bias, eps, act, rate, clock, site, parts)


@_op.register_fake
def _fake(x, weight, bias, eps, act, rate, clock, site, parts=1):
    shape = (*x.shape[:-2], x.shape[-1])
    kept = accumulate_dtype(x.dtype)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, x.new_empty(shape, dtype=kept), x.new_empty(shape, dtype=kept)


@_backward_op.register_fake
def _backward_fake(grad, x, weight, bias, mean, var, eps, act, rate, clock, site, parts=1):
    sums = mean.new_empty(*mean.shape[:-1], 2, mean.shape[-1])
    return torch.empty_like(x, memory_format=torch.contiguous_format), sums


@_normalise_op.register_fake
def _normalise_fake(x, mean, var, weight, bias, eps, act, rate, clock, site, parts=1):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup(ctx, inputs, output):
    x, weight, bias, ctx.eps, ctx.act, rate, clock, ctx.site, ctx.parts = inputs
    _, mean, var = output
    ctx.save_for_backward(x, weight, bias, mean, var, rate, clock)
    ctx.mark_non_differentiable(mean, var)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, *_):
    if grad is None:
        return (None,) * 9
    *given, rate, clock = ctx.saved_tensors
    _, weight, bias, *_ = given
    grad_x, sums = _backward_op(grad.contiguous(), *given, ctx.eps, ctx.act, rate, clock, ctx.site, ctx.parts)
    grad_weight, grad_bias = sums.unbind(-2)
    return grad_x, grad_weight.to(weight.dtype), grad_bias.to(bias.dtype), *(None,) * 6


_op.register_autograd(_backward, setup_context=_setup)


@_op.register_vmap
def _vmap(info, in_dims, *arguments):
    return _op(*lead_tasks(info.batch_size, in_dims, arguments)), (0, 0, 0)


@_backward_op.register_vmap
def _backward_vmap(info, in_dims, *arguments):
    led = lead_tasks(info.batch_size, in_dims, arguments)
    return _backward_op(*(value.contiguous() if isinstance(value, Tensor) else value for value in led)), (0, 0)


@_normalise_op.register_vmap
def _normalise_vmap(info, in_dims, *arguments):
    return _normalise_op(*lead_tasks(info.batch_size, in_dims, arguments)), 0


def batch_norm_act_dropout(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-5,
    act: str = "none",
    p: float | Tensor = 0.0,
    clock: Tensor | None = None,
    site: int = 0,
    parts: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """``dropout(act(norm(x)))`` of ``x [..., N, F]`` by its own columns, with ``weight`` and ``bias [..., F]``.

    Returns ``(out [..., N, F], mean [..., F], var [..., F])``; the variance is the biased one. Only ``out`` is
    differentiable. ``act``, ``p``, ``clock``, ``site`` and ``parts`` are those of
    :func:`~weft.ops.dense.bias_act_dropout.bias_act_dropout`.
    """
    check_columns("batch_norm_act_dropout", x, x.dim() - 2, weight, bias)
    return _op(x, weight, bias, eps, *as_ending("batch_norm_act_dropout", weight, act, p, clock, site, parts))


def normalise_act_dropout(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-5,
    act: str = "none",
    p: float | Tensor = 0.0,
    clock: Tensor | None = None,
    site: int = 0,
    parts: int = 1,
) -> Tensor:
    """The same with given ``mean`` and ``var [..., F]``. Not differentiable: it serves evaluation."""
    check_columns("normalise_act_dropout", x, weight.dim() - 1, mean, var, weight, bias)
    ending = as_ending("normalise_act_dropout", weight, act, p, clock, site, parts)
    return _normalise_op(x, mean, var, weight, bias, eps, *ending)
