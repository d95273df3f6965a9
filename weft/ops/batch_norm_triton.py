"""Triton kernels of ``batch_norm.py``: two column sums in one pass, then the gradient in another."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.backend import accumulate_dtype, next_power_of_2
from weft.ops.lang import tl, triton
from weft.ops.launch import triton_acc

PROGRAMS = 528  # four to each of an H200's 132 multiprocessors


@triton.jit
def _sums_kernel(
    grad, x, mean, var, partial, N, rows_per_program, eps,
    F: tl.constexpr, ACC: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """``sum of grad`` and ``sum of grad * normalised x`` over a range of rows."""
    part = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    in_f = f < F
    centre = tl.load(mean + task * F + f, mask=in_f, other=0.0).to(ACC)
    deviation = 1.0 / tl.sqrt(tl.load(var + task * F + f, mask=in_f, other=1.0).to(ACC) + eps)
    first = part * rows_per_program
    last = tl.minimum(first + rows_per_program, N)
    total = tl.zeros([BN, BF], ACC)
    product = tl.zeros([BN, BF], ACC)
    for base in range(first, last, BN):
        n = base + tl.arange(0, BN)
        mask = (n < last)[:, None] & in_f[None, :]
        at = (task * N + n)[:, None] * F + f[None, :]
        slope = tl.load(grad + at, mask=mask, other=0.0).to(ACC)
        value = tl.load(x + at, mask=mask, other=0.0).to(ACC)
        total += slope
        product += slope * (value - centre[None, :]) * deviation[None, :]
    into = partial + ((task * tl.num_programs(0) + part) * 2) * F + f
    tl.store(into, tl.sum(product, 0), mask=in_f)
    tl.store(into + F, tl.sum(total, 0), mask=in_f)


@triton.jit
def _gradient_kernel(
    grad, x, weight, mean, var, sums, grad_x, N, eps,
    F: tl.constexpr, ACC: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    task = tl.program_id(2).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    in_f = f < F
    centre = tl.load(mean + task * F + f, mask=in_f, other=0.0).to(ACC)
    deviation = 1.0 / tl.sqrt(tl.load(var + task * F + f, mask=in_f, other=1.0).to(ACC) + eps)
    scale = tl.load(weight + task * F + f, mask=in_f, other=0.0).to(ACC) * deviation
    mean_product = tl.load(sums + task * 2 * F + f, mask=in_f, other=0.0).to(ACC) / N
    mean_grad = tl.load(sums + (task * 2 + 1) * F + f, mask=in_f, other=0.0).to(ACC) / N
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    mask = (n < N)[:, None] & in_f[None, :]
    at = (task * N + n)[:, None] * F + f[None, :]
    slope = tl.load(grad + at, mask=mask, other=0.0).to(ACC)
    normal = (tl.load(x + at, mask=mask, other=0.0).to(ACC) - centre[None, :]) * deviation[None, :]
    value = (slope - mean_grad[None, :] - normal * mean_product[None, :]) * scale[None, :]
    tl.store(grad_x + at, value.to(grad_x.dtype.element_ty), mask=mask)


def batch_norm_backward_triton(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients to ``x [..., N, F]``, and to weight and bias ``[..., 2, F]``; partial sums are added in a fixed order."""
    lead, (N, F) = x.shape[:-2], x.shape[-2:]
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    mean, var = mean.contiguous(), var.contiguous()
    tasks, kept = lead.numel(), accumulate_dtype(x.dtype)
    grad_x = torch.empty_like(x)
    if x.numel() == 0:
        return grad_x, mean.new_zeros(*lead, 2, F)
    block_f = min(128, next_power_of_2(F))
    block_n = max(1, 2048 // block_f)
    rows = max(block_n, -(-N // max(1, PROGRAMS // tasks)))
    programs, tiles = -(-N // rows), -(-F // block_f)
    partial = x.new_empty(tasks, programs, 2, F, dtype=kept)
    sizes = {"F": F, "ACC": triton_acc(x.dtype), "BN": block_n, "BF": block_f}
    _sums_kernel[(programs, tiles, tasks)](grad, x, mean, var, partial, N, rows, eps, **sizes)
    sums = partial.squeeze(1) if programs == 1 else partial.sum(1)
    _gradient_kernel[(-(-N // block_n), tiles, tasks)](grad, x, weight, mean, var, sums, grad_x, N, eps, **sizes)
    return grad_x, sums.reshape(*lead, 2, F)
