"""Triton kernel of ``loss.py``: softmax, loss and gradient of the labelled rows in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.backend import accumulate_dtype, next_power_of_2
from weft.ops.lang import tl, triton


@triton.jit
def _cross_entropy_kernel(
    logits, labels, rows, grad, losses, M, C, stride_task,
    ACC: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    task = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, BC)
    listed = m < M
    row = tl.load(rows + m, mask=listed, other=0).to(tl.int64)
    label = tl.load(labels + row, mask=listed, other=0)
    mask = listed[:, None] & (c < C)[None, :]
    at = task * stride_task + row[:, None] * C + c[None, :]
    value = tl.load(logits + at, mask=mask, other=float("-inf")).to(ACC)
    shifted = value - tl.where(listed, tl.max(value, 1), 0.0)[:, None]
    exps = tl.exp(shifted)
    total = tl.where(listed, tl.sum(exps, 1), 1.0)
    chosen = c[None, :] == label[:, None]
    log_p = tl.sum(tl.where(chosen & mask, shifted, 0.0), 1) - tl.log(total)
    tl.store(losses + task * tl.num_programs(0) + tl.program_id(0), tl.sum(tl.where(listed, -log_p, 0.0), 0) / M)
    slope = (exps / total[:, None] - tl.where(chosen, 1.0, 0.0)) / M
    tl.store(grad + at, slope.to(grad.dtype.element_ty), mask=mask)


def cross_entropy_rows_triton(logits: Tensor, labels: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """``(loss [...], gradient [..., N, C])``; rows that are not listed have gradient 0."""
    lead, (N, C) = logits.shape[:-2], logits.shape[-2:]
    logits_TNC = logits.reshape(-1, N, C).contiguous()
    tasks = logits_TNC.shape[0]
    grad = torch.zeros_like(logits_TNC)
    block_c = next_power_of_2(C)
    block_m = max(1, 2048 // block_c)
    programs = -(-rows.numel() // block_m)
    losses = torch.empty(tasks, programs, dtype=accumulate_dtype(logits.dtype), device=logits.device)
    _cross_entropy_kernel[(programs, tasks)](
        logits_TNC, labels, rows, grad, losses, rows.numel(), C, N * C,
        ACC=tl.float64 if logits.dtype == torch.float64 else tl.float32, BM=block_m, BC=block_c, num_warps=4,
    )  # fmt: skip
    return losses.sum(1).reshape(lead), grad.reshape(logits.shape)
