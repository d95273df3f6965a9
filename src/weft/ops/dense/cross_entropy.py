"""cross_entropy_rows: the mean cross-entropy over the labelled rows alone.

    loss[t] = - mean over m of log softmax(logits[t, rows[m]])[labels[rows[m]]]

Only the listed rows are read, in both passes; nothing of their softmax is kept in between.
Shapes: T tasks, N rows, C classes, M listed rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft.ops.launch.backend import accumulate_dtype, batch_tasks, by_device, custom_op, next_power_of_2
from weft.ops.launch.triton_lang import tl, triton, triton_acc

# ---- Triton kernels: the softmax of the labelled rows, once for the loss, once for its
# gradient

FEW = 4  # blocks of rows up to which one program takes all: adding up the parts of several would be a second launch


@triton.jit
def _cross_entropy_kernel(
    logits, labels, rows, grad_loss, losses, grad, M, N, C: tl.constexpr, GRADIENT: tl.constexpr, ACC: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    task = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, BC)
    loss = 0.0
    for block in tl.static_range(BLOCKS):
        m = (tl.program_id(0) * BLOCKS + block) * BM + tl.arange(0, BM)
        listed = m < M
        row = tl.load(rows + m, mask=listed, other=0).to(tl.int64)
        label = tl.load(labels + row, mask=listed, other=0)
        mask = listed[:, None] & (c < C)[None, :]
        at = (task * N + row)[:, None] * C + c[None, :]
        value = tl.load(logits + at, mask=mask, other=float("-inf")).to(ACC)
        shifted = value - tl.where(listed, tl.max(value, 1), 0.0)[:, None]
        exps = tl.exp(shifted)
        total = tl.where(listed, tl.sum(exps, 1), 1.0)
        chosen = c[None, :] == label[:, None]
        if GRADIENT:
            scale = tl.load(grad_loss + task).to(ACC) / M
            slope = (exps / total[:, None] - tl.where(chosen, 1.0, 0.0)) * scale
            tl.store(grad + at, slope.to(grad.dtype.element_ty), mask=mask)
        else:
            log_p = tl.sum(tl.where(chosen & mask, shifted, 0.0), 1) - tl.log(total)
            loss += tl.sum(tl.where(listed, -log_p, 0.0), 0) / M
    if not GRADIENT:
        tl.store(losses + task * tl.num_programs(0) + tl.program_id(0), loss)


def _launch(
    logits_TNC: Tensor, labels: Tensor, rows: Tensor, grad_loss: Tensor | None, grad: Tensor | None, few: int = 1
) -> Tensor:
    """Partial losses ``[T, programs]`` (one program for up to ``few`` blocks), or the gradient into ``grad``."""
    tasks, N, C = logits_TNC.shape
    block_c = next_power_of_2(C)
    block_m = max(1, 1024 // block_c)
    blocks = -(-rows.numel() // block_m)
    each = blocks if 1 <= blocks <= few else 1
    programs = -(-blocks // each)
    losses = torch.empty(tasks, programs, dtype=accumulate_dtype(logits_TNC.dtype), device=logits_TNC.device)
    _cross_entropy_kernel[(programs, tasks)](
        logits_TNC, labels, rows, losses if grad_loss is None else grad_loss, losses,
        losses if grad is None else grad, rows.numel(), N, C=C, GRADIENT=grad is not None,
        ACC=triton_acc(logits_TNC.dtype), BM=block_m, BC=block_c, BLOCKS=each, num_warps=2,
    )  # fmt: skip
    return losses


def cross_entropy_parts_triton(logits: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
    """Partial losses of ``logits [..., N, C]``, to be summed: ``[T, programs, 1]``."""
    logits_TNC = logits.reshape(-1, *logits.shape[-2:]).contiguous()
    return _launch(logits_TNC, labels, rows, None, None)[..., None]


def cross_entropy_rows_triton(logits: Tensor, labels: Tensor, rows: Tensor, few: int = FEW) -> Tensor:
    """Loss ``[...]`` of ``logits [..., N, C]``; ``few``: see :data:`FEW`."""
    losses = _launch(logits.reshape(-1, *logits.shape[-2:]).contiguous(), labels, rows, None, None, few)
    return (losses if losses.shape[1] == 1 else losses.sum(1)).reshape(logits.shape[:-2])


def cross_entropy_rows_backward_triton(
    grad_loss: Tensor,
    logits: Tensor,
    labels: Tensor,
    rows: Tensor,
    zeros: Callable[[Tensor], Tensor] = torch.zeros_like,
) -> Tensor:
    """Gradient ``[..., N, C]``; rows that are not listed get 0, from a matrix that ``zeros`` makes like the logits."""
    logits_TNC = logits.reshape(-1, *logits.shape[-2:]).contiguous()
    grad = zeros(logits_TNC)
    _launch(logits_TNC, labels, rows, grad_loss.contiguous(), grad)
    return grad.reshape(logits.shape)


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


_op = custom_op("weft::cross_entropy_rows", "(Tensor logits, Tensor labels, Tensor rows) -> Tensor")(
    by_device(cross_entropy_rows_triton, cross_entropy_rows_torch)
)
_backward_op = custom_op(
    "weft::cross_entropy_rows_backward", "(Tensor grad_loss, Tensor logits, Tensor labels, Tensor rows) -> Tensor"
)(by_device(cross_entropy_rows_backward_triton, cross_entropy_rows_backward_torch))


def _backward(ctx, grad_loss):
    return _backward_op(grad_loss, *ctx.saved_tensors), None, None


_op.register_fake(
    lambda logits, labels, rows: logits.new_empty(logits.shape[:-2], dtype=accumulate_dtype(logits.dtype))
)
_op.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
batch_tasks(_op, shared=(1, 2))
batch_tasks(_backward_op, shared=(2, 3), like=(1,))


def cross_entropy_rows(logits: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
    """Mean cross-entropy of ``logits [..., N, C]`` over the nodes ``rows [M]`` with ``labels [N]``: ``[...]``."""
    return _op(logits, labels, rows)
