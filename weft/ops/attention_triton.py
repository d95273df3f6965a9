"""Triton kernels of ``attention.py``: an online softmax over the edges of every row.

A tile has L *lanes*: in the light half a lane is a row that meets its edges one by one, in the heavy half a lane
takes every L-th edge of one row. Either way a lane keeps a running maximum, a running denominator and the
weighted sums relative to that maximum; the lanes of a heavy row, and the chunks of a hub, are merged at the end.

Tiles are ``[L, BH, BD]``: lanes, heads, features of a head (both padded to powers of two).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.ops.backend import accumulate_dtype, next_power_of_2
from weft.ops.lang import tl, triton
from weft.ops.random_triton import keep_scale, mix_key
from weft.ops.walk import Walk


@triton.jit
def _meet_edge(
    x, a_src, indices, edge, inside, dst, h, d, H, D, slope, key, rate, top, total, total_plus, acc, acc_plus,
    S_SRC: tl.constexpr, PLUS: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One edge for every lane: fold it into the running softmax."""
    col = tl.load(indices + edge, mask=inside, other=0).to(tl.int64)
    heads = inside[:, None] & (h < H)[None, :]
    argument = tl.load(a_src + col[:, None] * S_SRC + h[None, :], mask=heads, other=0.0).to(ACC) + dst
    score = tl.where(heads, tl.where(argument > 0, argument, argument * slope), float("-inf"))
    higher = tl.maximum(top, score)
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp(top - shift)
    share = tl.exp(score - shift)
    kept = share
    if DROP:
        kept = share * keep_scale(key, rate, edge[:, None] * H + h[None, :]).to(ACC)
    at = col[:, None, None] * (H * D) + h[None, :, None] * D + d[None, None, :]
    value = tl.load(x + at, mask=heads[:, :, None] & (d < D)[None, None, :], other=0.0).to(ACC)
    acc = acc * fade[:, :, None] + kept[:, :, None] * value
    total = total * fade + share
    if PLUS:
        positive = argument > 0
        acc_plus = acc_plus * fade[:, :, None] + tl.where(positive, kept, 0.0)[:, :, None] * value
        total_plus = total_plus * fade + tl.where(positive, share, 0.0)
    return higher, total, total_plus, acc, acc_plus


@triton.jit
def merge_lanes(top, total, total_plus, acc, acc_plus, PLUS: tl.constexpr):
    """Merge the lanes of one row: ``[L, ...]`` to ``[1, ...]`` in effect, returned without the lane axis."""
    best = tl.max(top, 0)
    shift = tl.where(best == float("-inf"), 0.0, best)
    fade = tl.exp(top - shift[None, :])
    total = tl.sum(total * fade, 0)
    acc = tl.sum(acc * fade[:, :, None], 0)
    if PLUS:
        total_plus = tl.sum(total_plus * fade, 0)
        acc_plus = tl.sum(acc_plus * fade[:, :, None], 0)
    else:
        total_plus = total
        acc_plus = acc
    return best, total, total_plus, acc, acc_plus


@triton.jit
def finish_rows(
    out, out_plus, alpha_plus, log_sum, row, valid, h, d, H, D, top, total, total_plus, acc, acc_plus,
    LOG: tl.constexpr, PLUS: tl.constexpr,
):  # fmt: skip
    """Normalise and store rows: ``row, valid [L]``, sums ``[L, BH]`` and ``[L, BH, BD]``."""
    mask_h = valid[:, None] & (h < H)[None, :]
    mask_d = mask_h[:, :, None] & (d < D)[None, None, :]
    share = 1.0 / tl.where(total > 0, total, 1.0)
    at_h = row[:, None] * H + h[None, :]
    at_d = at_h[:, :, None] * D + d[None, None, :]
    tl.store(out + at_d, (acc * share[:, :, None]).to(out.dtype.element_ty), mask=mask_d)
    if PLUS:
        tl.store(out_plus + at_d, (acc_plus * share[:, :, None]).to(out.dtype.element_ty), mask=mask_d)
        tl.store(alpha_plus + at_h, total_plus * share, mask=mask_h)
    if LOG:
        tl.store(
            log_sum + at_h,
            tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), 0.0),
            mask=mask_h,
        )


@triton.jit
def _forward_kernel(
    x, a_src, a_dst, rate, clock, indices,
    heavy_start, heavy_len, heavy_row, light_start, light_len, light_row, hub_row, hub_of_partial,
    out, out_plus, alpha_plus, log_sum, part_stats, part_acc,
    num_heavy, num_light, num_partial, M, N, slope, site, stride_rate, stride_clock,
    H: tl.constexpr, D: tl.constexpr, S_SRC: tl.constexpr, S_DST: tl.constexpr, PLUS: tl.constexpr,
    DROP: tl.constexpr, ACC: tl.constexpr, UNROLL: tl.constexpr, L: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    d = tl.arange(0, BD)
    lane = tl.arange(0, L)
    x += task * M * H * D
    a_src += task * M * S_SRC
    a_dst += task * N * S_DST
    out += task * N * H * D
    out_plus += task * N * H * D
    alpha_plus += task * N * H
    log_sum += task * N * H
    key = tl.zeros([], tl.uint64)
    fraction = tl.zeros([], tl.float32)
    if DROP:
        key = mix_key(clock + task * stride_clock, site)
        fraction = tl.load(rate + task * stride_rate).to(tl.float32)
    top = tl.full([L, BH], float("-inf"), ACC)
    total = tl.zeros([L, BH], ACC)
    total_plus = tl.zeros([L, BH], ACC)
    acc = tl.zeros([L, BH, BD], ACC)
    acc_plus = tl.zeros([L, BH, BD], ACC)
    if piece < num_heavy:
        start_one = tl.load(heavy_start + piece).to(tl.int64)
        length_one = tl.load(heavy_len + piece)
        row_one = tl.load(heavy_row + piece).to(tl.int64)
        if piece < num_partial:
            row_one = tl.load(hub_row + tl.load(hub_of_partial + piece)).to(tl.int64)
        dst_one = tl.load(a_dst + row_one * S_DST + h, mask=h < H, other=0.0).to(ACC)[None, :]
        for first in range(0, length_one, L * UNROLL):
            for step in tl.static_range(UNROLL):
                place = first + step * L + lane
                top, total, total_plus, acc, acc_plus = _meet_edge(
                    x, a_src, indices, start_one + place, place < length_one, dst_one, h, d, H, D, slope, key, fraction,
                    top, total, total_plus, acc, acc_plus, S_SRC, PLUS, DROP, ACC,
                )  # fmt: skip
        top1, total1, plus1, acc1, acc_plus1 = merge_lanes(top, total, total_plus, acc, acc_plus, PLUS)
        if piece < num_partial:
            at_h_one = (task * num_partial + piece) * H + h
            at_d_one = at_h_one[:, None] * D + d[None, :]
            mask_d_one = (h < H)[:, None] & (d < D)[None, :]
            size_h = tl.num_programs(2) * num_partial.to(tl.int64) * H
            tl.store(part_stats + at_h_one, top1, mask=h < H)
            tl.store(part_stats + size_h + at_h_one, total1, mask=h < H)
            tl.store(part_acc + at_d_one, acc1, mask=mask_d_one)
            if PLUS:
                tl.store(part_stats + 2 * size_h + at_h_one, plus1, mask=h < H)
                tl.store(part_acc + size_h * D + at_d_one, acc_plus1, mask=mask_d_one)
        else:
            one = tl.zeros([1], tl.int64)
            finish_rows(
                out, out_plus, alpha_plus, log_sum, one + row_one, one == 0, h, d, H, D, top1[None, :], total1[None, :],
                plus1[None, :], acc1[None, :, :], acc_plus1[None, :, :], PLUS, PLUS,
            )  # fmt: skip
    else:
        item = (piece - num_heavy) * L + lane
        valid = item < num_light
        start = tl.load(light_start + item, mask=valid, other=0).to(tl.int64)
        length = tl.load(light_len + item, mask=valid, other=0)
        row = tl.load(light_row + item, mask=valid, other=0).to(tl.int64)
        dst = tl.load(a_dst + row[:, None] * S_DST + h[None, :], mask=valid[:, None] & (h < H)[None, :], other=0.0).to(
            ACC
        )
        for first in range(0, tl.max(length, 0), UNROLL):
            for step in tl.static_range(UNROLL):
                top, total, total_plus, acc, acc_plus = _meet_edge(
                    x, a_src, indices, start + first + step, first + step < length, dst, h, d, H, D, slope, key, fraction,
                    top, total, total_plus, acc, acc_plus, S_SRC, PLUS, DROP, ACC,
                )  # fmt: skip
        finish_rows(
            out,
            out_plus,
            alpha_plus,
            log_sum,
            row,
            valid,
            h,
            d,
            H,
            D,
            top,
            total,
            total_plus,
            acc,
            acc_plus,
            PLUS,
            PLUS,
        )


@triton.jit
def merge_hubs_kernel(
    part_stats, part_acc, hub_ptr, hub_row, out, out_plus, alpha_plus, log_sum, num_partial, N, H: tl.constexpr, D: tl.constexpr,
    LOG: tl.constexpr, PLUS: tl.constexpr, ACC: tl.constexpr, L: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Merge the chunks of one hub, L at a time and always in the same order."""
    hub = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    d = tl.arange(0, BD)
    size_h = tl.num_programs(2) * num_partial.to(tl.int64) * H
    top = tl.full([L, BH], float("-inf"), ACC)
    total = tl.zeros([L, BH], ACC)
    total_plus = tl.zeros([L, BH], ACC)
    acc = tl.zeros([L, BH, BD], ACC)
    acc_plus = tl.zeros([L, BH, BD], ACC)
    last = tl.load(hub_ptr + hub + 1)
    for first in range(tl.load(hub_ptr + hub), last, L):
        part = first + tl.arange(0, L)
        mask_h = (part < last)[:, None] & (h < H)[None, :]
        mask_d = mask_h[:, :, None] & (d < D)[None, None, :]
        at_h = (task * num_partial + part)[:, None] * H + h[None, :]
        at_d = at_h[:, :, None] * D + d[None, None, :]
        new_top = tl.load(part_stats + at_h, mask=mask_h, other=float("-inf"))
        higher = tl.maximum(top, new_top)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        fade, gain = tl.exp(top - shift), tl.exp(new_top - shift)
        total = total * fade + gain * tl.load(part_stats + size_h + at_h, mask=mask_h, other=0.0)
        acc = acc * fade[:, :, None] + gain[:, :, None] * tl.load(part_acc + at_d, mask=mask_d, other=0.0)
        if PLUS:
            total_plus = total_plus * fade + gain * tl.load(part_stats + 2 * size_h + at_h, mask=mask_h, other=0.0)
            plus = tl.load(part_acc + size_h * D + at_d, mask=mask_d, other=0.0)
            acc_plus = acc_plus * fade[:, :, None] + gain[:, :, None] * plus
        top = higher
    top1, total1, plus1, acc1, acc_plus1 = merge_lanes(top, total, total_plus, acc, acc_plus, PLUS)
    one = tl.zeros([1], tl.int64)
    row = tl.load(hub_row + hub).to(tl.int64)
    finish_rows(
        out + task * N * H * D, out_plus + task * N * H * D, alpha_plus + task * N * H, log_sum + task * N * H,
        one + row, one == 0, h, d, H, D, top1[None, :], total1[None, :], plus1[None, :], acc1[None, :, :],
        acc_plus1[None, :, :], LOG, PLUS,
    )  # fmt: skip


@triton.jit
def _row_gradient_kernel(
    grad, out, out_plus, alpha_plus, a_dst, log_sum, stats, grad_a_dst, rows, slope,
    H: tl.constexpr, D: tl.constexpr, S_DST: tl.constexpr, SHARED: tl.constexpr, ACC: tl.constexpr,
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
    tl.store(grad_a_dst + item, d_dst.to(grad_a_dst.dtype.element_ty), mask=valid)
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
    if SHARED:
        in_row = inside[:, None] & (d < D)[None, :]
        value = tl.load(grad + col[:, None] * D + d[None, :], mask=in_row, other=0.0).to(ACC)[:, None, :]
    else:
        value = tl.load(grad + at_h[:, :, None] * D + d[None, None, :], mask=mask_d, other=0.0).to(ACC)
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
    H: tl.constexpr, D: tl.constexpr, S_SRC: tl.constexpr, SHARED: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr,
    UNROLL: tl.constexpr, L: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Walks the transpose: rows are sources (M of them), columns destinations (N)."""
    piece = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    d = tl.arange(0, BD)
    lane = tl.arange(0, L)
    grad += task * N * (D if SHARED else H * D)
    stats += task * N * H * 3
    x += task * M * H * D
    a_src += task * M * S_SRC
    grad_x += task * M * H * D
    grad_a += task * M * H
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
        at_h_one = row_one * H + h
        at_d_one = at_h_one[:, None] * D + d[None, :]
        mask_d_one = (h < H)[:, None] & (d < D)[None, :]
        src_one = tl.load(a_src + row_one * S_SRC + h, mask=h < H, other=0.0).to(ACC)[None, :]
        x_row_one = tl.load(x + at_d_one, mask=mask_d_one, other=0.0).to(ACC)[None, :, :]
        for first in range(0, length_one, L * UNROLL):
            for step in tl.static_range(UNROLL):
                place = first + step * L + lane
                sum_x, sum_a = _edge_gradient(
                    grad, stats, x_row_one, src_one, indices, perm, start_one + place, place < length_one, h, d, H, D,
                    slope, key, fraction, sum_x, sum_a, SHARED, DROP, ACC,
                )  # fmt: skip
        if piece < num_partial:
            slot_h = (task * num_partial + piece) * H + h
            tl.store(part_x + slot_h[:, None] * D + d[None, :], tl.sum(sum_x, 0), mask=mask_d_one)
            tl.store(part_a + slot_h, tl.sum(sum_a, 0), mask=h < H)
        else:
            tl.store(grad_x + at_d_one, tl.sum(sum_x, 0).to(grad_x.dtype.element_ty), mask=mask_d_one)
            tl.store(grad_a + at_h_one, tl.sum(sum_a, 0).to(grad_a.dtype.element_ty), mask=h < H)
    else:
        item = (piece - num_heavy) * L + lane
        valid = item < num_light
        start = tl.load(light_start + item, mask=valid, other=0).to(tl.int64)
        length = tl.load(light_len + item, mask=valid, other=0)
        row = tl.load(light_row + item, mask=valid, other=0).to(tl.int64)
        mask_h = valid[:, None] & (h < H)[None, :]
        at_h = row[:, None] * H + h[None, :]
        at_d = at_h[:, :, None] * D + d[None, None, :]
        mask_d = mask_h[:, :, None] & (d < D)[None, None, :]
        src = tl.load(a_src + row[:, None] * S_SRC + h[None, :], mask=mask_h, other=0.0).to(ACC)
        x_row = tl.load(x + at_d, mask=mask_d, other=0.0).to(ACC)
        for first in range(0, tl.max(length, 0), UNROLL):
            for step in tl.static_range(UNROLL):
                sum_x, sum_a = _edge_gradient(
                    grad, stats, x_row, src, indices, perm, start + first + step, first + step < length, h, d, H, D,
                    slope, key, fraction, sum_x, sum_a, SHARED, DROP, ACC,
                )  # fmt: skip
        tl.store(grad_x + at_d, sum_x.to(grad_x.dtype.element_ty), mask=mask_d)
        tl.store(grad_a + at_h, sum_a.to(grad_a.dtype.element_ty), mask=mask_h)


@triton.jit
def add_hub_parts_kernel(
    part, hub_ptr, hub_row, out, num_partial, N, F, ACC: tl.constexpr, L: tl.constexpr, BF: tl.constexpr
):
    """``out[row of the hub] = sum of its parts [P, F]``, in a fixed order."""
    hub = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    total = tl.zeros([L, BF], ACC)
    last = tl.load(hub_ptr + hub + 1)
    for first in range(tl.load(hub_ptr + hub), last, L):
        slot = first + tl.arange(0, L)
        at = (task * num_partial + slot)[:, None] * F + f[None, :]
        total += tl.load(part + at, mask=(slot < last)[:, None] & (f < F)[None, :], other=0.0)
    row = tl.load(hub_row + hub).to(tl.int64)
    tl.store(out + (task * N + row) * F + f, tl.sum(total, 0).to(out.dtype.element_ty), mask=f < F)


@dataclass(frozen=True)
class AttentionLaunch:
    """Launch parameters: lanes, heads and features of a tile, warps."""

    lanes: int
    block_heads: int
    block_width: int
    num_warps: int = 1
    unroll: int = 2


def choose_forward_launch(heads: int, width: int) -> AttentionLaunch:
    """One warp to a tile of 512 elements and at least four lanes, so that the lanes of a row meet in registers.

    Measured on an H200 (arxiv shape): 4 heads of 16, 0.16 ms against 0.36 with four warps on 1024 elements; 4 heads
    of 40, 0.73 ms with two heads to a tile against 0.88 with all four.
    """
    block_width = next_power_of_2(width)
    block_heads = min(next_power_of_2(heads), max(1, 128 // block_width))
    lanes = max(1, min(32, 512 // (block_heads * block_width)))
    return AttentionLaunch(lanes, block_heads, block_width, max(1, min(8, block_heads * block_width // 512)))


def choose_backward_launch(heads: int, width: int) -> AttentionLaunch:
    """Four lanes over all heads that fit, 16 elements to a thread; more spill (measured 1.9 ms against 0.67)."""
    block_width = next_power_of_2(width)
    block_heads = min(next_power_of_2(heads), max(1, 512 // block_width))
    return AttentionLaunch(4, block_heads, block_width, max(1, min(8, block_heads * block_width // 128)))


def triton_acc(dtype: torch.dtype):
    """The accumulation type in Triton's terms."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def flatten_tasks(value: Tensor, keep: int) -> Tensor:
    """``[..., a, b]`` to contiguous ``[T, a, b]``, ``keep`` trailing dimensions kept."""
    return value.reshape(-1, *value.shape[value.dim() - keep :]).contiguous()


def strided_rows(value: Tensor) -> tuple[Tensor, int]:
    """``[..., N, H]`` and the elements from one row to the next: columns of one task's matrix need no copy."""
    if value.dim() == 2 and value.stride(-1) == 1:
        return value, value.stride(0)
    value = value.contiguous()
    return value, value.shape[-1]


def per_task_stride(value: Tensor | None, tasks: int, width: int) -> int:
    """Elements between two tasks' values, 0 where they share one (or there is none)."""
    return width if value is not None and tasks > 1 and value.numel() == tasks * width else 0


def add_hub_parts(part: Tensor, work, out: Tensor) -> None:
    """Add the parts ``[T, P, F]`` of every hub into its row of ``out [T, N, F]``."""
    tasks, num_partial, width = part.shape
    block = min(128, next_power_of_2(width))
    add_hub_parts_kernel[(work.hub_row.numel(), -(-width // block), tasks)](
        part, work.hub_ptr, work.hub_row, out, num_partial, out.shape[1], width,
        ACC=triton_acc(part.dtype), L=16, BF=block, num_warps=4,
    )  # fmt: skip


def attention_forward_triton(
    x: Tensor, a_src: Tensor, a_dst: Tensor, slope: float, rate: Tensor | None, clock: Tensor | None, site: int,
    walk: Walk, training: bool, launch: AttentionLaunch | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``(out, out_plus, alpha_plus, log_sum)``; the last three are left unwritten unless ``training``."""
    work = walk.work
    M, H, D = x.shape[-3:]
    N = walk.num_rows
    lead = x.shape[:-3]
    x_T = flatten_tasks(x, 3)
    (src_T, stride_src), (dst_T, stride_dst) = strided_rows(a_src), strided_rows(a_dst)
    tasks, acc = x_T.shape[0], accumulate_dtype(x.dtype)
    out = x.new_empty(tasks, N, H, D)
    out_plus = torch.empty_like(out)
    alpha_plus = x.new_empty(tasks, N, H, dtype=acc)
    log_sum = torch.empty_like(alpha_plus)
    if out.numel():
        launch = launch or choose_forward_launch(H, D)
        partials, hubs = work.hub_of_partial.numel(), work.hub_row.numel()
        part_stats = x.new_empty(3, tasks, max(partials, 1), H, dtype=acc)
        part_acc = x.new_empty(2, tasks, max(partials, 1), H, D, dtype=acc)
        heads = -(-H // launch.block_heads)
        num_heavy, num_light = work.heavy_row.numel(), work.light_row.numel()
        _forward_kernel[(num_heavy + -(-num_light // launch.lanes), heads, tasks)](
            x_T, src_T, dst_T, x_T if rate is None else rate.contiguous(), x_T if clock is None else clock.contiguous(),
            walk.indices, work.heavy_start, work.heavy_len, work.heavy_row,
            work.light_start, work.light_len, work.light_row, work.hub_row, work.hub_of_partial,
            out, out_plus, alpha_plus, log_sum, part_stats, part_acc,
            num_heavy, num_light, partials, M, N, slope, site,
            per_task_stride(rate, tasks, 1), per_task_stride(clock, tasks, 2),
            H=H, D=D, S_SRC=stride_src, S_DST=stride_dst, PLUS=training, DROP=rate is not None, ACC=triton_acc(x.dtype),
            UNROLL=launch.unroll,
            L=launch.lanes, BH=launch.block_heads, BD=launch.block_width, num_warps=launch.num_warps,
        )  # fmt: skip
        if hubs:
            merge_hubs_kernel[(hubs, heads, tasks)](
                part_stats, part_acc, work.hub_ptr, work.hub_row, out, out_plus, alpha_plus, log_sum,
                partials, N, H=H, D=D, LOG=training, PLUS=training, ACC=triton_acc(x.dtype),
                L=launch.lanes, BH=launch.block_heads, BD=launch.block_width, num_warps=launch.num_warps,
            )  # fmt: skip
    shape_d, shape_h = (*lead, N, H, D), (*lead, N, H)
    return (
        out.reshape(shape_d),
        out_plus.reshape(shape_d),
        alpha_plus.reshape(shape_h),
        log_sum.reshape(shape_h),
    )


def heads_share(grad: Tensor) -> bool:
    """Whether ``grad [..., N, H, D]`` is one row seen by every head, as it is behind a sum over heads."""
    return grad.shape[-2] > 1 and grad.stride(-2) == 0 and grad.select(-2, 0).is_contiguous()


def one_head(grad: Tensor) -> tuple[Tensor, bool]:
    """``(grad [..., N, D], True)`` where all heads share it, else ``(contiguous grad, False)``."""
    return (grad.select(-2, 0), True) if heads_share(grad) else (grad.contiguous(), False)


def attention_row_gradient_triton(
    grad: Tensor, out: Tensor, out_plus: Tensor, alpha_plus: Tensor, a_dst: Tensor, log_sum: Tensor, slope: float
) -> tuple[Tensor, Tensor]:
    """``(stats [..., N, H, 3], grad_a_dst [..., N, H])``; stats are a_dst, log_sum and delta = <grad, out>."""
    H, D = grad.shape[-2:]
    stats = log_sum.new_empty(*log_sum.shape, 3)
    grad_a_dst = torch.empty_like(a_dst, memory_format=torch.contiguous_format)
    rows = log_sum.numel() // H
    if rows:
        grad, shared = one_head(grad)
        a_dst, stride_dst = strided_rows(a_dst)
        block_d = next_power_of_2(D)
        block_n = max(1, 1024 // block_d)
        _row_gradient_kernel[(-(-rows * H // block_n),)](
            grad, out, out_plus, alpha_plus, a_dst, log_sum, stats, grad_a_dst, rows, slope,
            H=H, D=D, S_DST=stride_dst, SHARED=shared, ACC=triton_acc(grad.dtype), BN=block_n, BD=block_d, num_warps=4,
        )  # fmt: skip
    return stats, grad_a_dst


def attention_backward_triton(
    grad: Tensor, x: Tensor, a_src: Tensor, stats: Tensor, slope: float,
    rate: Tensor | None, clock: Tensor | None, site: int, back: Walk, launch: AttentionLaunch | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(grad_x [..., M, H, D], grad_a_src [..., M, H])`` by one pass over the transpose."""
    work = back.work
    M, H, D = x.shape[-3:]
    N = grad.shape[-3]
    acc = accumulate_dtype(x.dtype)
    grad, shared = one_head(grad)
    x_T, (src_T, stride_src) = flatten_tasks(x, 3), strided_rows(a_src)
    tasks = x_T.shape[0]
    stats = flatten_tasks(stats, 3)
    grad_x, grad_a = torch.empty_like(x_T), x.new_empty(tasks, M, H, dtype=a_src.dtype)
    if grad_x.numel():
        launch = launch or choose_backward_launch(H, D)
        partials = work.hub_of_partial.numel()
        part_x = x.new_empty(tasks, max(partials, 1), H * D, dtype=acc)
        part_a = x.new_empty(tasks, max(partials, 1), H, dtype=acc)
        num_heavy, num_light = work.heavy_row.numel(), work.light_row.numel()
        grid = (num_heavy + -(-num_light // launch.lanes), -(-H // launch.block_heads), tasks)
        _backward_kernel[grid](
            grad, stats, x_T, src_T, x_T if rate is None else rate.contiguous(),
            x_T if clock is None else clock.contiguous(), back.indices, back.perm,
            work.heavy_start, work.heavy_len, work.heavy_row, work.light_start, work.light_len, work.light_row,
            work.hub_row, work.hub_of_partial, grad_x, grad_a, part_x, part_a,
            num_heavy, num_light, partials, M, N, slope, site,
            per_task_stride(rate, tasks, 1), per_task_stride(clock, tasks, 2),
            H=H, D=D, S_SRC=stride_src, SHARED=shared, DROP=rate is not None, ACC=triton_acc(x.dtype),
            UNROLL=launch.unroll, L=launch.lanes, BH=launch.block_heads, BD=launch.block_width, num_warps=launch.num_warps,
        )  # fmt: skip
        if partials:
            add_hub_parts(part_x, work, grad_x.view(tasks, M, H * D))
            add_hub_parts(part_a, work, grad_a)
    return grad_x.reshape(x.shape), grad_a.reshape(a_src.shape)
