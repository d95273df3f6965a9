"""cross_entropy_rows: the mean cross-entropy over the labelled rows alone.

    loss[t] = - mean over m of log softmax(logits[t, rows[m]])[labels[rows[m]]]

Only the listed rows are read, in both passes; nothing of their softmax is kept in between.
Shapes: T tasks, N rows, C classes, M listed rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.launch.backend import accumulate_dtype, custom_op, use_triton
from weft.ops.train.cross_entropy_triton import cross_entropy_rows_backward_triton, cross_entropy_rows_triton


def cross_entropy_rows_torch(logits: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
    """Reference: loss ``[...]``."""
    log_p = logits.index_select(-2, rows).to(accumulate_dtype(logits.dtype)).log_softmax(-1)
    target = labels[rows][:, None].expand(*log_p.shape[:-1], 1)
    return -log_p.gather(-1, target).squeeze(-1).mean(-1)


def cross_entropy_rows_backward_torch(grad_loss: Tensor, logits: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
    """Reference: gradient to the logits ``[..., N, C]``."""
    p = logits.index_select(-2, rows).to(accumulate_dtype(logits.dtype)).softmax(-1)
    target = labels[rows][:, None].expand(*p.shape[:-1], 1)
    slope = p.scatter_add(-1, target, torch.full_like(target, -1, dtype=p.dtype)) / rows.numel()
    slope = (slope * grad_loss[..., None, None]).to(logits.dtype)
    return torch.zeros_like(logits).index_copy(-2, rows, slope)


@custom_op("weft::cross_entropy_rows", mutates_args=(), schema="(Tensor logits, Tensor labels, Tensor rows) -> Tensor")
def _op(logits, labels, rows):
    serve = cross_entropy_rows_triton if use_triton(logits) else cross_entropy_rows_torch
    return serve(logits, labels, rows)


@custom_op(
    "weft::cross_entropy_rows_backward",
    mutates_args=(),
    schema="(Tensor grad_loss, Tensor logits, Tensor labels, Tensor rows) -> Tensor",
)
def _backward_op(grad_loss, logits, labels, rows):
    serve = cross_entropy_rows_backward_triton if use_triton(logits) else cross_entropy_rows_backward_torch
    return serve(grad_loss, logits, labels, rows)


@_op.register_fake
def _fake(logits, labels, rows):
    return logits.new_empty(logits.shape[:-2], dtype=accumulate_dtype(logits.dtype))


@_backward_op.register_fake
def _backward_fake(grad_loss, logits, labels, rows):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_loss):
    return _backward_op(grad_loss, *ctx.saved_tensors), None, None


_op.register_autograd(_backward, setup_context=_setup)


@_op.register_vmap
def _vmap(info, in_dims, logits, labels, rows):
    return _op(logits.movedim(in_dims[0], 0), labels, rows), 0


@_backward_op.register_vmap
def _backward_vmap(info, in_dims, grad_loss, logits, labels, rows):
    size = info.batch_size
    grad_loss = grad_loss.movedim(in_dims[0], 0) if in_dims[0] is not None else grad_loss.expand(size)
    logits = logits.movedim(in_dims[1], 0) if in_dims[1] is not None else logits.expand(size, *logits.shape)
    return _backward_op(grad_loss, logits, labels, rows), 0


def cross_entropy_rows(logits: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
    """Mean cross-entropy of ``logits [..., N, C]`` over the nodes ``rows [M]`` with ``labels [N]``: ``[...]``."""
    return _op(logits, labels, rows)
