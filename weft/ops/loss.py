"""cross_entropy_rows: the mean cross-entropy over the labelled rows alone.

    loss[t] = - mean over m of log softmax(logits[t, rows[m]])[labels[rows[m]]]

Shapes: T tasks, N rows, C classes, M listed rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.backend import accumulate_dtype, use_triton
from weft.ops.loss_triton import cross_entropy_rows_triton


def cross_entropy_rows_torch(logits: Tensor, labels: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Reference: ``(loss [...], gradient of the loss to the logits [..., N, C])``."""
    acc = accumulate_dtype(logits.dtype)
    chosen = logits.index_select(-2, rows).to(acc)
    log_p = chosen.log_softmax(-1)
    target = labels[rows][:, None].expand(*chosen.shape[:-1], 1)
    loss = -log_p.gather(-1, target).squeeze(-1).mean(-1)
    grad_rows = log_p.exp().scatter_add(-1, target, target.new_full(target.shape, -1).to(acc)) / rows.numel()
    grad = torch.zeros_like(logits, dtype=acc).index_copy(-2, rows, grad_rows)
    return loss.to(acc), grad.to(logits.dtype)


@torch.library.custom_op(
    "weft::cross_entropy_rows",
    mutates_args=(),
    schema="(Tensor logits, Tensor labels, Tensor rows) -> (Tensor, Tensor)",
)
def _op(logits, labels, rows):
    if use_triton(logits):
        return cross_entropy_rows_triton(logits, labels, rows)
    return cross_entropy_rows_torch(logits, labels, rows)


@_op.register_fake
def _fake(logits, labels, rows):
    loss = logits.new_empty(logits.shape[:-2], dtype=accumulate_dtype(logits.dtype))
    return loss, torch.empty_like(logits, memory_format=torch.contiguous_format)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_loss, _):
    (grad,) = ctx.saved_tensors
    return grad * grad_loss[..., None, None].to(grad.dtype), None, None


_op.register_autograd(_backward, setup_context=_setup)


@_op.register_vmap
def _vmap(info, in_dims, logits, labels, rows):
    return _op(logits.movedim(in_dims[0], 0), labels, rows), (0, 0)


def cross_entropy_rows(logits: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
    """Mean cross-entropy of ``logits [..., N, C]`` over the nodes ``rows [M]`` with ``labels [N]``.

    The gradient is formed in the forward pass, while the softmax is at hand.
    """
    return _op(logits, labels, rows)[0]
