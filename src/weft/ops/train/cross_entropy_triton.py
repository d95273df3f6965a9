"""Triton kernel of ``cross_entropy.py``: the softmax of the labelled rows, once for the loss, once for its gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft.ops.launch.backend import accumulate_dtype, next_power_of_2
from weft.ops.launch.triton_lang import tl, triton, triton_acc

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
    """Partial losses ``[T, programs]`` (one program for up to ``few`` blocks of rows), or the gradient into ``grad``."""
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
