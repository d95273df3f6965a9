"""linear: a dense layer over many rows, with a weight gradient that fills the GPU.

    out[t, n, o] = sum over i of x[t, n, i] * weight[t, o, i] + bias[t, o]

The weight gradient ``grad^T x`` is a product with a huge inner dimension (N rows) and a tiny result. Batched
GEMM libraries give it one tile a task (measured 2.2 of 3.5 ms per task on an H200, arxiv shape); here the
rows are split over the whole device and the partial results added in a fixed order.

Shapes: T tasks, N rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.backend import use_triton
from weft.ops.column_sum import column_sum
from weft.ops.weight_grad_triton import weight_grad_triton


def weight_grad_torch(grad: Tensor, x: Tensor) -> Tensor:
    """Reference: ``grad^T x``, ``[..., O, I]``."""
    return grad.transpose(-2, -1) @ x


@torch.library.custom_op("weft::weight_grad", mutates_args=(), schema="(Tensor grad, Tensor x) -> Tensor")
def weight_grad(grad, x):
    """``grad [..., N, O]`` and ``x [..., N, I]`` to ``[..., O, I]``."""
    if use_triton(x):
        return weight_grad_triton(grad, x)
    return weight_grad_torch(grad, x).contiguous()


@weight_grad.register_fake
def _weight_grad_fake(grad, x):
    return x.new_empty(*x.shape[:-2], grad.shape[-1], x.shape[-1])


@weight_grad.register_vmap
def _weight_grad_vmap(info, in_dims, grad, x):
    grad = grad.movedim(in_dims[0], 0) if in_dims[0] is not None else grad.expand(info.batch_size, *grad.shape)
    x = x.movedim(in_dims[1], 0) if in_dims[1] is not None else x.expand(info.batch_size, *x.shape)
    return weight_grad(grad, x), 0


@torch.library.custom_op("weft::linear", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
def _linear_op(x, weight, bias):
    if bias is None:
        return x @ weight.transpose(-2, -1)
    if x.dim() == 2:
        return torch.addmm(bias, x, weight.t())
    return x @ weight.transpose(-2, -1) + (bias.unsqueeze(-2) if bias.dim() > 1 else bias)


@_linear_op.register_fake
def _linear_fake(x, weight, bias):
    return x.new_empty(*x.shape[:-1], weight.shape[-2])


def _linear_setup(ctx, inputs, output):
    x, weight, ctx.bias = inputs
    ctx.save_for_backward(x, weight)


def _linear_backward(ctx, grad):
    x, weight = ctx.saved_tensors
    grad = grad.contiguous()
    grad_x = grad @ weight if ctx.needs_input_grad[0] else None
    grad_weight = weight_grad(grad, x) if ctx.needs_input_grad[1] else None
    grad_bias = column_sum(grad) if ctx.needs_input_grad[2] else None
    return grad_x, grad_weight, grad_bias


_linear_op.register_autograd(_linear_backward, setup_context=_linear_setup)


@_linear_op.register_vmap
def _linear_vmap(info, in_dims, x, weight, bias):
    size = info.batch_size
    x = x.movedim(in_dims[0], 0) if in_dims[0] is not None else x.expand(size, *x.shape)
    weight = weight.movedim(in_dims[1], 0) if in_dims[1] is not None else weight.expand(size, *weight.shape)
    if bias is not None:
        bias = bias.movedim(in_dims[2], 0) if in_dims[2] is not None else bias.expand(size, *bias.shape)
    return _linear_op(x, weight, bias), 0


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [..., N, I]`` through ``weight [..., O, I]`` and ``bias [..., O]`` to ``[..., N, O]``."""
    if not x.is_cuda and weight.dim() == 2:
        return torch.nn.functional.linear(x, weight, bias)
    return _linear_op(x, weight, bias)
