"""batch_norm: every column to mean 0 and variance 1 over the rows of its task, then scaled and shifted.

    out[t, n, f] = (x[t, n, f] - mean[t, f]) / sqrt(var[t, f] + eps) * weight[t, f] + bias[t, f]

For one task torch's own kernels are as good; those would want the columns of T tasks side by side, ``[N, T F]``, and
mapped over tasks they copy the activations there and back. The backward pass reads its two inputs twice.

Shapes: T tasks, N rows, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.backend import accumulate_dtype, use_triton
from weft.ops.batch_norm_triton import batch_norm_backward_triton
from weft.ops.dropout import lead_task


def batch_norm_torch(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Reference: ``(out, mean, var)``; the variance is the biased one."""
    var, mean = torch.var_mean(x.to(accumulate_dtype(x.dtype)), -2, correction=0)
    scale = weight * (var + eps).rsqrt()
    shift = bias - mean * scale
    return torch.addcmul(shift.unsqueeze(-2), x, scale.unsqueeze(-2)).to(x.dtype), mean, var


def batch_norm_backward_torch(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Reference: the gradient to ``x``, and those to ``weight`` and ``bias`` side by side ``[..., 2, F]``."""
    acc = accumulate_dtype(x.dtype)
    deviation = (var + eps).rsqrt()
    slope, normal = grad.to(acc), (x.to(acc) - mean.unsqueeze(-2)) * deviation.unsqueeze(-2)
    grad_bias, grad_weight = slope.sum(-2), (slope * normal).sum(-2)
    rows = max(x.shape[-2], 1)
    centred = slope - (grad_bias / rows).unsqueeze(-2) - normal * (grad_weight / rows).unsqueeze(-2)
    return (centred * (weight * deviation).unsqueeze(-2)).to(x.dtype), torch.stack([grad_weight, grad_bias], -2)


@torch.library.custom_op(
    "weft::batch_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)",
)
def _op(x, weight, bias, eps):
    return batch_norm_torch(x, weight, bias, eps)


@torch.library.custom_op(
    "weft::batch_norm_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor weight, Tensor mean, Tensor var, float eps) -> (Tensor, Tensor)",
)
def _backward_op(grad, x, weight, mean, var, eps):
    serve = batch_norm_backward_triton if use_triton(x) else batch_norm_backward_torch
    return serve(grad, x, weight, mean, var, eps)


@_op.register_fake
def _fake(x, weight, bias, eps):
    shape = (*x.shape[:-2], x.shape[-1])
    kept = accumulate_dtype(x.dtype)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, x.new_empty(shape, dtype=kept), x.new_empty(shape, dtype=kept)


@_backward_op.register_fake
def _backward_fake(grad, x, weight, mean, var, eps):
    sums = mean.new_empty(*mean.shape[:-1], 2, mean.shape[-1])
    return torch.empty_like(x, memory_format=torch.contiguous_format), sums


def _setup(ctx, inputs, output):
    x, weight, bias, ctx.eps = inputs
    _, mean, var = output
    ctx.bias_like = bias.dtype
    ctx.save_for_backward(x, weight, mean, var)
    ctx.mark_non_differentiable(mean, var)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, *_):
    if grad is None:
        return None, None, None, None
    x, weight, mean, var = ctx.saved_tensors
    grad_x, sums = _backward_op(grad.contiguous(), x, weight, mean, var, ctx.eps)
    grad_weight, grad_bias = sums.unbind(-2)
    return grad_x, grad_weight.to(weight.dtype), grad_bias.to(ctx.bias_like), None


_op.register_autograd(_backward, setup_context=_setup)


@_op.register_vmap
def _vmap(info, in_dims, x, weight, bias, eps):
    parts = (lead_task(value, dim, info.batch_size) for value, dim in zip((x, weight, bias), in_dims, strict=False))
    return _op(*parts, eps), (0, 0, 0)


@_backward_op.register_vmap
def _backward_vmap(info, in_dims, *arguments):
    *tensors, eps = arguments
    parts = [lead_task(v, d, info.batch_size).contiguous() for v, d in zip(tensors, in_dims, strict=False)]
    return _backward_op(*parts, eps), (0, 0)


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor, Tensor]:
    """``x [..., N, F]`` normalised by its own columns, with ``weight`` and ``bias [..., F]``.

    Returns ``(out [..., N, F], mean [..., F], var [..., F])``; the variance is the biased one. Only ``out`` is
    differentiable.
    """
    return _op(x, weight, bias, eps)
