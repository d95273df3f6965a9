"""Triton kernels of ``attention.py``, backward: what a row knows of itself, then one pass over the transpose."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.backend import accumulate_dtype, next_power_of_2
from weft.ops.lanes_triton import (
    AttentionLaunch,
    add_hub_parts,
    choose_backward_launch,
    spaced_rows,
)
from weft.ops.lang import tl, triton
from weft.ops.launch import flatten_tasks, per_task_stride, triton_acc
from weft.ops.random_triton import keep_scale, mix_key
from weft.ops.walk import Walk


@triton.jit
def _row_gradient_kernel(
    grad, out, out_plus, alpha_plus, a_dst, log_sum, stats, grad_a_dst, rows, slope,
    H: tl.constexpr, D: tl.constexpr, S_DST: tl.constexpr, G_DST: tl.constexpr, SHARED: tl.constexpr, ACC: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Per row and head: delta, d a_dst, and the three numbers that the pass over the transpose reads together."""
    item = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)  # a row and a head
    d = tl.arange(0, BD)
    valid = item < rows * H
    mask = valid[:, None] & (d < D)[None, :]
    at = item[:, None] * D + d[None, :]
    at_grad = (item // H)[:, None] * D + d[None, :] if SHARED else at
    g = tl.load(grad + at_grad, mask=mask, other=0.0).to(ACC)
    delta = tl.sum(g * tl.load(out + at, mask=mask, other=0.0).to(ACC), 1)
    plus = tl.sum(g * tl.load(out_plus + at, mask=mask, other=0.0).to(ACC), 1)
    share = tl.load(alpha_plus + item, mask=valid, other=0.0)
    d_dst = (1.0 - slope) * (plus - delta * share)
    tl.store(grad_a_dst + (item // H) * G_DST + item % H, d_dst.to(grad_a_dst.dtype.element_ty), mask=valid)
    tl.store(
        stats + item * 3, tl.load(a_dst + (item // H) * S_DST + item % H, mask=valid, other=0.0).to(ACC), mask=valid
    )
    tl.store(stats + item * 3 + 1, tl.load(log_sum + item, mask=valid, other=0.0), mask=valid)
    tl.store(stats + item * 3 + 2, delta, mask=valid)


@triton.jit
def _edge_gradient(
    grad, stats, x_row, src, indices, perm, edge, inside, h, d, H, D, slope, key, rate, grad_x, grad_a,
    SHARED: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One edge of the transpose for every lane: fold its part of d x and d a_src."""
    col = tl.load(indices + edge, mask=inside, other=0).to(tl.int64)
    mask_h = inside[:, None] & (h < H)[None, :]
    mask_d = mask_h[:, :, None] & (d < D)[None, None, :]
    at_h = col[:, None] * H + h[None, :]
    argument = src + tl.load(stats + at_h * 3, mask=mask_h, other=0.0)
    score = tl.where(argument > 0, argument, argument * slope)
    alpha = tl.where(mask_h, tl.exp(score - tl.load(stats + at_h * 3 + 1, mask=mask_h, other=0.0)), 0.0)
    kept = alpha
    if DROP:
        position = tl.load(perm + edge, mask=inside, other=0).to(tl.int64)
        kept = alpha * keep_scale(key, rate, position[:, None] * H + h[None, :]).to(ACC)
    # A gradient that all heads share is addressed by the same tile with no step from head to head: the first-level
    # cache serves the repeats. A narrower tile, broadcast, would have to change its layout (measured 6x slower).
    at_grad = (col[:, None] * D + h[None, :] * 0)[:, :, None] if SHARED else at_h[:, :, None] * D
    value = tl.load(grad + at_grad + d[None, None, :], mask=mask_d, other=0.0).to(ACC)
    d_score = kept * tl.sum(value * x_row, 2) - alpha * tl.load(stats + at_h * 3 + 2, mask=mask_h, other=0.0)
    grad_x += kept[:, :, None] * value
    grad_a += tl.where(argument > 0, d_score, d_score * slope)
    return grad_x, grad_a


@triton.jit
def _backward_kernel(
    grad, stats, x, a_src, rate, clock, indices, perm,
    heavy_start, heavy_len, heavy_row, light_start, light_len, light_row, hub_row, hub_of_partial,
    grad_x, grad_a, part_x, part_a,
    num_heavy, num_light, num_partial, M, N, slope, site, stride_rate, stride_clock,
    H: tl.constexpr, D: tl.constexpr, S_X: tl.constexpr, S_SRC: tl.constexpr, G_X: tl.constexpr,
    G_SRC: tl.constexpr, SHARED: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr,
    L: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Walks the transpose: rows are sources (M of them), columns destinations (N)."""
    piece = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    d = tl.arange(0, BD)
    lane = tl.arange(0, L)
    grad += task * N * (D if SHARED else H * D)
    stats += task * N * H * 3
    x += task * M * S_X
    a_src += task * M * S_SRC
    grad_x += task * M * G_X
    grad_a += task * M * G_SRC
    key = tl.zeros([], tl.uint64)
    fraction = tl.zeros([], tl.float32)
    if DROP:
        key = mix_key(clock + task * stride_clock, site)
        fraction = tl.load(rate + task * stride_rate).to(tl.float32)
    sum_x = tl.zeros([L, BH, BD], ACC)
    sum_a = tl.zeros([L, BH], ACC)
    if piece < num_heavy:
        start_one = tl.load(heavy_start + piece).to(tl.int64)
        length_one = tl.load(heavy_len + piece)
        row_one = tl.load(heavy_row + piece).to(tl.int64)
        if piece < num_partial:
            row_one = tl.load(hub_row + tl.load(hub_of_partial + piece)).to(tl.int64)
        at_one = h[:, None] * D + d[None, :]
        mask_d_one = (h < H)[:, None] & (d < D)[None, :]
        src_one = tl.load(a_src + row_one * S_SRC + h, mask=h < H, other=0.0).to(ACC)[None, :]
        x_row_one = tl.load(x + row_one * S_X + at_one, mask=mask_d_one, other=0.0).to(ACC)[None, :, :]
        for first in range(0, length_one, L):
            place = first + lane
            sum_x, sum_a = _edge_gradient(
                grad, stats, x_row_one, src_one, indices, perm, start_one + place, place < length_one, h, d, H, D,
                slope, key, fraction, sum_x, sum_a, SHARED, DROP, ACC,
            )  # fmt: skip
        if piece < num_partial:
            slot_h = (task * num_partial + piece) * H + h
            tl.store(part_x + slot_h[:, None] * D + d[None, :], tl.sum(sum_x, 0), mask=mask_d_one)
            tl.store(part_a + slot_h, tl.sum(sum_a, 0), mask=h < H)
        else:
            tl.store(grad_x + row_one * G_X + at_one, tl.sum(sum_x, 0).to(grad_x.dtype.element_ty), mask=mask_d_one)
            tl.store(grad_a + row_one * G_SRC + h, tl.sum(sum_a, 0).to(grad_a.dtype.element_ty), mask=h < H)
    else:
        item = (piece - num_heavy) * L + lane
        valid = item < num_light
        start = tl.load(light_start + item, mask=valid, other=0).to(tl.int64)
        length = tl.load(light_len + item, mask=valid, other=0)
        row = tl.load(light_row + item, mask=valid, other=0).to(tl.int64)
        mask_h = valid[:, None] & (h < H)[None, :]
        at = h[None, :, None] * D + d[None, None, :]
        mask_d = mask_h[:, :, None] & (d < D)[None, None, :]
        src = tl.load(a_src + row[:, None] * S_SRC + h[None, :], mask=mask_h, other=0.0).to(ACC)
        x_row = tl.load(x + row[:, None, None] * S_X + at, mask=mask_d, other=0.0).to(ACC)
        for step in range(tl.max(length, 0)):
            sum_x, sum_a = _edge_gradient(
                grad, stats, x_row, src, indices, perm, start + step, step < length, h, d, H, D,
                slope, key, fraction, sum_x, sum_a, SHARED, DROP, ACC,
            )  # fmt: skip
        tl.store(grad_x + row[:, None, None] * G_X + at, sum_x.to(grad_x.dtype.element_ty), mask=mask_d)
        tl.store(grad_a + row[:, None] * G_SRC + h[None, :], sum_a.to(grad_a.dtype.element_ty), mask=mask_h)


def one_head(grad: Tensor) -> tuple[Tensor, bool]:
    """``(grad [..., N, D], True)`` where one row is seen by every head, as it is behind a sum over heads.

    Otherwise ``(contiguous grad [..., N, H, D], False)``.
    """
    if grad.shape[-2] > 1 and grad.stride(-2) == 0 and grad.select(-2, 0).is_contiguous():
        return grad.select(-2, 0), True
    return grad.contiguous(), False


def attention_row_gradient_triton(
    grad: Tensor, out: Tensor, out_plus: Tensor, alpha_plus: Tensor, a_dst: Tensor, log_sum: Tensor, slope: float,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(stats [..., N, H, 3], grad_a_dst [..., N, H])``; stats are a_dst, log_sum and delta = <grad, out>.

    The gradient is written ``into`` columns of a wider matrix where they are given.
    """
    H, D = grad.shape[-2:]
    stats = log_sum.new_empty(*log_sum.shape, 3)
    grad_a_dst = torch.empty_like(a_dst, memory_format=torch.contiguous_format) if into is None else into
    rows = log_sum.numel() // H
    if rows:
        grad, shared = one_head(grad)
        (a_dst, s_dst), (_, g_dst) = spaced_rows(a_dst, 1), spaced_rows(grad_a_dst, 1)
        block_d = next_power_of_2(D)
        block_n = max(1, 1024 // block_d)
        _row_gradient_kernel[(-(-rows * H // block_n),)](
            grad, out, out_plus, alpha_plus, a_dst, log_sum, stats, grad_a_dst, rows, slope,
            H=H, D=D, S_DST=s_dst, G_DST=g_dst, SHARED=shared, ACC=triton_acc(grad.dtype),
            BN=block_n, BD=block_d, num_warps=4,
        )  # fmt: skip
    return stats, grad_a_dst


def attention_backward_triton(
    grad: Tensor, x: Tensor, a_src: Tensor, stats: Tensor, slope: float, rate: Tensor | None, clock: Tensor | None,
    site: int, back: Walk, launch: AttentionLaunch | None = None, into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(grad_x [..., M, H, D], grad_a_src [..., M, H])`` by one pass over the transpose, written ``into`` if given."""
    work = back.work
    M, H, D = x.shape[-3:]
    N, tasks = grad.shape[-3], x.shape[:-3].numel()
    acc = accumulate_dtype(x.dtype)
    contiguous = torch.contiguous_format
    grad_x, grad_a = into or (
        torch.empty_like(x, memory_format=contiguous),
        torch.empty_like(a_src, memory_format=contiguous),
    )
    if not grad_x.numel():
        return grad_x, grad_a
    grad, shared = one_head(grad)
    stats = flatten_tasks(stats, 3)
    (x, s_x), (a_src, s_src) = spaced_rows(x, 2), spaced_rows(a_src, 1)
    (_, g_x), (_, g_src) = spaced_rows(grad_x, 2), spaced_rows(grad_a, 1)
    launch = launch or choose_backward_launch(H, D)
    partials = work.hub_of_partial.numel()
    part_x = x.new_empty(tasks, max(partials, 1), H * D, dtype=acc)
    part_a = x.new_empty(tasks, max(partials, 1), H, dtype=acc)
    num_heavy, num_light = work.heavy_row.numel(), work.light_row.numel()
    grid = (num_heavy + -(-num_light // launch.lanes), -(-H // launch.block_heads), tasks)
    _backward_kernel[grid](
        grad, stats, x, a_src, x if rate is None else rate.contiguous(), x if clock is None else clock.contiguous(),
        back.indices, back.perm, work.heavy_start, work.heavy_len, work.heavy_row,
        work.light_start, work.light_len, work.light_row, work.hub_row, work.hub_of_partial,
        grad_x, grad_a, part_x, part_a, num_heavy, num_light, partials, M, N, slope, site,
        per_task_stride(rate, tasks, 1), per_task_stride(clock, tasks, 2),
        H=H, D=D, S_X=s_x, S_SRC=s_src, G_X=g_x, G_SRC=g_src, SHARED=shared, DROP=rate is not None,
        ACC=triton_acc(x.dtype), L=launch.lanes, BH=launch.block_heads, BD=launch.block_width,
        num_warps=launch.num_warps,
    )  # fmt: skip
    if partials:
        add_hub_parts(part_x, work, grad_x, M, g_x)
        add_hub_parts(part_a, work, grad_a, M, g_src)
    return grad_x, grad_a
