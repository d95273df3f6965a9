"""chunk_matmul: rows in chunks, each chunk times a matrix of its own.

    out[t, c K + k, :] = x[t, c K + k, :] @ weight[t, c, :, :]

It is a batched product of torch's, forward and backward; what is Weft's is the rule for ``vmap``: members that share
``x`` put their matrices side by side, so that ``x`` is read once and never repeated T times.

Shapes: T tasks, C chunks, K rows of a chunk, S = C * K rows, I features in, O features out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """``x [S, I]`` or ``[T, S, I]`` times ``weight [C, I, O]`` or ``[T, C, I, O]``."""
    chunks = x.unflatten(-2, (weight.shape[-3], -1))
    if x.dim() == 2 and weight.dim() == 4:
        return _apart(torch.bmm(chunks, _together(weight)), weight.shape[0]).flatten(-3, -2)
    return torch.matmul(chunks, weight).flatten(-3, -2)


def _weight_gradient(x: Tensor, grad: Tensor, chunks: int) -> Tensor:
    """``x^T grad`` chunk by chunk: ``[C, I, O]``, with a leading T if ``x`` or ``grad`` has one."""
    inputs, gradients = (t.unflatten(-2, (chunks, -1)) for t in (x, grad))
    if x.dim() == 2 and grad.dim() == 3:
        return _apart(torch.bmm(inputs.mT, _together(gradients)), grad.shape[0])
    return torch.matmul(inputs.mT, gradients)


def _together(parts: Tensor) -> Tensor:
    """``[T, C, A, O]`` to ``[C, A, T O]``."""
    return parts.permute(1, 2, 0, 3).flatten(2)


def _apart(wide: Tensor, tasks: int) -> Tensor:
    """``[C, A, T O]`` to ``[T, C, A, O]``."""
    return wide.unflatten(-1, (tasks, -1)).permute(2, 0, 1, 3).contiguous()


class _ChunkMatmul(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return _product(x, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        x, weight = inputs
        needs_x, needs_weight = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.shapes = x.shape, weight.shape

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        x_shape, weight_shape = ctx.shapes
        grad_x = _product(grad, weight.mT).sum_to_size(x_shape) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None
        return grad_x, _weight_gradient(x, grad, weight_shape[-3]).sum_to_size(weight_shape)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, int | None], x: Tensor, weight: Tensor) -> tuple[Tensor, int]:
        x = x if in_dims[0] is None else x.movedim(in_dims[0], 0)
        weight = weight if in_dims[1] is None else weight.movedim(in_dims[1], 0)
        return _ChunkMatmul.apply(x, weight), 0


def chunk_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """``x [S, I]`` in C equal chunks of rows, each times its matrix of ``weight [C, I, O]``: ``[S, O]``."""
    return _ChunkMatmul.apply(x, weight)
