"""Triton kernels of ``attention.py``: the softmax's statistics from the scores alone, then the weighted sums.

A tile has L *lanes*: in the light half a lane is a row that meets its edges one by one, in the heavy half a lane
takes every L-th edge of one row; the lanes of a heavy row, and the chunks of a hub, are merged at the end. The
scores of an edge are a few bytes, so knowing the denominators first costs little and spares the sums their rescaling.

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
def _fold_score(
    a_src, indices, edge, inside, dst, h, H, slope, top, total, plus, S_SRC: tl.constexpr, ACC: tl.constexpr
):
    """One edge for every lane: fold its score into the running maximum, denominator and positive part."""
    col = tl.load(indices + edge, mask=inside, other=0).to(tl.int64)
    heads = inside[:, None] & (h < H)[None, :]
    argument = tl.load(a_src + col[:, None] * S_SRC + h[None, :], mask=heads, other=0.0).to(ACC) + dst
    score = tl.where(heads, tl.where(argument > 0, argument, argument * slope), float("-inf"))
    higher = tl.maximum(top, score)
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp(top - shift)
    share = tl.exp(score - shift)
    return higher, total * fade + share, plus * fade + tl.where(argument > 0, share, 0.0)


@triton.jit
def _merge_scores(top, total, plus):
    """Merge the lanes of one row: ``[L, BH]`` to ``[BH]``."""
    best = tl.max(top, 0)
    fade = tl.exp(top - tl.where(best == float("-inf"), 0.0, best)[None, :])
    return best, tl.sum(total * fade, 0), tl.sum(plus * fade, 0)


@triton.jit
def _store_softmax(log_sum, alpha_plus, at, top, total, plus, mask):
    """The logarithm of the denominator and the share of the positive edges; 0 for rows without edges."""
    some = total > 0
    safe = tl.where(some, total, 1.0)
    tl.store(log_sum + at, tl.where(some, top + tl.log(safe), 0.0), mask=mask)
    tl.store(alpha_plus + at, plus / safe, mask=mask)


@triton.jit
def _softmax_kernel(
    a_src, a_dst, indices,
    heavy_start, heavy_len, heavy_row, light_start, light_len, light_row, hub_row, hub_of_partial,
    log_sum, alpha_plus, part, num_heavy, num_light, num_partial, M, N, slope,
    H: tl.constexpr, S_SRC: tl.constexpr, S_DST: tl.constexpr, ACC: tl.constexpr, L: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """The softmax's statistics of every row, from the scores alone."""
    piece = tl.program_id(0)
    task = tl.program_id(1).to(tl.int64)
    h = tl.arange(0, BH)
    lane = tl.arange(0, L)
    a_src += task * M * S_SRC
    a_dst += task * N * S_DST
    top = tl.full([L, BH], float("-inf"), ACC)
    total = tl.zeros([L, BH], ACC)
    plus = tl.zeros([L, BH], ACC)
    if piece < num_heavy:
        start_one = tl.load(heavy_start + piece).to(tl.int64)
        length_one = tl.load(heavy_len + piece)
        row_one = tl.load(heavy_row + piece).to(tl.int64)
        if piece < num_partial:
            row_one = tl.load(hub_row + tl.load(hub_of_partial + piece)).to(tl.int64)
        dst_one = tl.load(a_dst + row_one * S_DST + h, mask=h < H, other=0.0).to(ACC)[None, :]
        for first in range(0, length_one, L):
            place = first + lane
            top, total, plus = _fold_score(
                a_src,
                indices,
                start_one + place,
                place < length_one,
                dst_one,
                h,
                H,
                slope,
                top,
                total,
                plus,
                S_SRC,
                ACC,
            )
        top1, total1, plus1 = _merge_scores(top, total, plus)
        if piece < num_partial:
            at_part = ((task * num_partial + piece) * 3) * H + h
            tl.store(part + at_part, top1, mask=h < H)
            tl.store(part + at_part + H, total1, mask=h < H)
            tl.store(part + at_part + 2 * H, plus1, mask=h < H)
        else:
            _store_softmax(log_sum, alpha_plus, (task * N + row_one) * H + h, top1, total1, plus1, h < H)
    else:
        item = (piece - num_heavy) * L + lane
        valid = item < num_light
        start = tl.load(light_start + item, mask=valid, other=0).to(tl.int64)
        length = tl.load(light_len + item, mask=valid, other=0)
        row = tl.load(light_row + item, mask=valid, other=0).to(tl.int64)
        heads = valid[:, None] & (h < H)[None, :]
        dst = tl.load(a_dst + row[:, None] * S_DST + h[None, :], mask=heads, other=0.0).to(ACC)
        for step in range(tl.max(length, 0)):
            top, total, plus = _fold_score(
                a_src, indices, start + step, step < length, dst, h, H, slope, top, total, plus, S_SRC, ACC
            )
        _store_softmax(log_sum, alpha_plus, (task * N + row)[:, None] * H + h[None, :], top, total, plus, heads)


@triton.jit
def _merge_softmax_kernel(
    part, hub_ptr, hub_row, log_sum, alpha_plus, num_partial, N,
    H: tl.constexpr, ACC: tl.constexpr, L: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Merge the statistics of the chunks of one hub, L at a time and always in the same order."""
    hub = tl.program_id(0)
    task = tl.program_id(1).to(tl.int64)
    h = tl.arange(0, BH)
    top = tl.full([L, BH], float("-inf"), ACC)
    total = tl.zeros([L, BH], ACC)
    plus = tl.zeros([L, BH], ACC)
    last = tl.load(hub_ptr + hub + 1)
    for first in range(tl.load(hub_ptr + hub), last, L):
        slot = first + tl.arange(0, L)
        mask = (slot < last)[:, None] & (h < H)[None, :]
        at = (task * num_partial + slot)[:, None] * (3 * H) + h[None, :]
        new_top = tl.load(part + at, mask=mask, other=float("-inf"))
        higher = tl.maximum(top, new_top)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        fade, gain = tl.exp(top - shift), tl.exp(new_top - shift)
        total = total * fade + gain * tl.load(part + at + H, mask=mask, other=0.0)
        plus = plus * fade + gain * tl.load(part + at + 2 * H, mask=mask, other=0.0)
        top = higher
    top1, total1, plus1 = _merge_scores(top, total, plus)
    row = tl.load(hub_row + hub).to(tl.int64)
    _store_softmax(log_sum, alpha_plus, (task * N + row) * H + h, top1, total1, plus1, h < H)


@triton.jit
def _add_edge(
    x, a_src, indices, edge, inside, dst, log_total, h, d, H, D, slope, key, rate, acc, acc_plus,
    S_SRC: tl.constexpr, PLUS: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One edge for every lane: add its row by its coefficient."""
    col = tl.load(indices + edge, mask=inside, other=0).to(tl.int64)
    heads = inside[:, None] & (h < H)[None, :]
    at = col[:, None, None] * (H * D) + h[None, :, None] * D + d[None, None, :]
    value = tl.load(x + at, mask=heads[:, :, None] & (d < D)[None, None, :], other=0.0).to(ACC)
    argument = tl.load(a_src + col[:, None] * S_SRC + h[None, :], mask=heads, other=0.0).to(ACC) + dst
    alpha = tl.where(heads, tl.exp(tl.where(argument > 0, argument, argument * slope) - log_total), 0.0)
    if DROP:
        alpha *= keep_scale(key, rate, edge[:, None] * H + h[None, :]).to(ACC)
    acc += alpha[:, :, None] * value
    if PLUS:
        acc_plus += tl.where(argument > 0, alpha, 0.0)[:, :, None] * value
    return acc, acc_plus


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
    x, a_src, a_dst, log_sum, rate, clock, indices,
    heavy_start, heavy_len, heavy_row, light_start, light_len, light_row, hub_row, hub_of_partial,
    out, out_plus, part, part_plus, num_heavy, num_light, num_partial, M, N, slope, site, stride_rate, stride_clock,
    H: tl.constexpr, D: tl.constexpr, S_SRC: tl.constexpr, S_DST: tl.constexpr, PLUS: tl.constexpr,
    DROP: tl.constexpr, ACC: tl.constexpr, L: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The weighted sums, once the softmax's statistics are known."""
    piece = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    d = tl.arange(0, BD)
    lane = tl.arange(0, L)
    x += task * M * H * D
    a_src += task * M * S_SRC
    a_dst += task * N * S_DST
    log_sum += task * N * H
    out += task * N * H * D
    out_plus += task * N * H * D
    key = tl.zeros([], tl.uint64)
    fraction = tl.zeros([], tl.float32)
    if DROP:
        key = mix_key(clock + task * stride_clock, site)
        fraction = tl.load(rate + task * stride_rate).to(tl.float32)
    acc = tl.zeros([L, BH, BD], ACC)
    acc_plus = tl.zeros([L, BH, BD], ACC)
    if piece < num_heavy:
        start_one = tl.load(heavy_start + piece).to(tl.int64)
        length_one = tl.load(heavy_len + piece)
        row_one = tl.load(heavy_row + piece).to(tl.int64)
        if piece < num_partial:
            row_one = tl.load(hub_row + tl.load(hub_of_partial + piece)).to(tl.int64)
        dst_one = tl.load(a_dst + row_one * S_DST + h, mask=h < H, other=0.0).to(ACC)[None, :]
        log_one = tl.load(log_sum + row_one * H + h, mask=h < H, other=0.0)[None, :]
        for first in range(0, length_one, L):
            place = first + lane
            acc, acc_plus = _add_edge(
                x, a_src, indices, start_one + place, place < length_one, dst_one, log_one, h, d, H, D, slope, key,
                fraction, acc, acc_plus, S_SRC, PLUS, DROP, ACC,
            )  # fmt: skip
        mask_one = (h < H)[:, None] & (d < D)[None, :]
        if piece < num_partial:
            at_part = ((task * num_partial + piece) * H + h)[:, None] * D + d[None, :]
            tl.store(part + at_part, tl.sum(acc, 0), mask=mask_one)
            if PLUS:
                tl.store(part_plus + at_part, tl.sum(acc_plus, 0), mask=mask_one)
        else:
            at_one = (row_one * H + h)[:, None] * D + d[None, :]
            tl.store(out + at_one, tl.sum(acc, 0).to(out.dtype.element_ty), mask=mask_one)
            if PLUS:
                tl.store(out_plus + at_one, tl.sum(acc_plus, 0).to(out.dtype.element_ty), mask=mask_one)
    else:
        item = (piece - num_heavy) * L + lane
        valid = item < num_light
        start = tl.load(light_start + item, mask=valid, other=0).to(tl.int64)
        length = tl.load(light_len + item, mask=valid, other=0)
        row = tl.load(light_row + item, mask=valid, other=0).to(tl.int64)
        heads = valid[:, None] & (h < H)[None, :]
        dst = tl.load(a_dst + row[:, None] * S_DST + h[None, :], mask=heads, other=0.0).to(ACC)
        log_total = tl.load(log_sum + row[:, None] * H + h[None, :], mask=heads, other=0.0)
        for step in range(tl.max(length, 0)):
            acc, acc_plus = _add_edge(
                x, a_src, indices, start + step, step < length, dst, log_total, h, d, H, D, slope, key,
                fraction, acc, acc_plus, S_SRC, PLUS, DROP, ACC,
            )  # fmt: skip
        at = (row[:, None] * H + h[None, :])[:, :, None] * D + d[None, None, :]
        mask = heads[:, :, None] & (d < D)[None, None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
        if PLUS:
            tl.store(out_plus + at, acc_plus.to(out.dtype.element_ty), mask=mask)


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
    H: tl.constexpr, D: tl.constexpr, S_SRC: tl.constexpr, SHARED: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr,
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
        for step in range(tl.max(length, 0)):
            sum_x, sum_a = _edge_gradient(
                grad, stats, x_row, src, indices, perm, start + step, step < length, h, d, H, D,
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
    lead = value.dim() - keep
    return value.reshape(value.shape[:lead].numel(), *value.shape[lead:]).contiguous()


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
    """``(out, out_plus, alpha_plus, log_sum)``; ``out_plus`` is left unwritten unless ``training``."""
    work = walk.work
    M, H, D = x.shape[-3:]
    N, lead = walk.num_rows, x.shape[:-3]
    x_T = flatten_tasks(x, 3)
    (src_T, stride_src), (dst_T, stride_dst) = strided_rows(a_src), strided_rows(a_dst)
    tasks, acc = x_T.shape[0], accumulate_dtype(x.dtype)
    out = x.new_empty(tasks, N, H, D)
    out_plus = torch.empty_like(out)
    alpha_plus, log_sum = x.new_empty(tasks, N, H, dtype=acc), x.new_empty(tasks, N, H, dtype=acc)
    if out.numel():
        _launch_softmax(src_T, dst_T, stride_src, stride_dst, slope, M, walk, log_sum, alpha_plus)
        launch = launch or choose_forward_launch(H, D)
        partials = work.hub_of_partial.numel()
        part = x.new_empty(2, tasks, max(partials, 1), H * D, dtype=acc)
        num_heavy, num_light = work.heavy_row.numel(), work.light_row.numel()
        _forward_kernel[(num_heavy + -(-num_light // launch.lanes), -(-H // launch.block_heads), tasks)](
            x_T, src_T, dst_T, log_sum, x_T if rate is None else rate.contiguous(),
            x_T if clock is None else clock.contiguous(), walk.indices, work.heavy_start, work.heavy_len,
            work.heavy_row, work.light_start, work.light_len, work.light_row, work.hub_row, work.hub_of_partial,
            out, out_plus, part[0], part[1], num_heavy, num_light, partials, M, N, slope, site,
            per_task_stride(rate, tasks, 1), per_task_stride(clock, tasks, 2),
            H=H, D=D, S_SRC=stride_src, S_DST=stride_dst, PLUS=training, DROP=rate is not None,
            ACC=triton_acc(x.dtype), L=launch.lanes, BH=launch.block_heads, BD=launch.block_width,
            num_warps=launch.num_warps,
        )  # fmt: skip
        if partials:
            add_hub_parts(part[0], work, out.view(tasks, N, H * D))
            if training:
                add_hub_parts(part[1], work, out_plus.view(tasks, N, H * D))
    shape_d, shape_h = (*lead, N, H, D), (*lead, N, H)
    return out.reshape(shape_d), out_plus.reshape(shape_d), alpha_plus.reshape(shape_h), log_sum.reshape(shape_h)


def _launch_softmax(src_T, dst_T, stride_src, stride_dst, slope, M, walk: Walk, log_sum, alpha_plus) -> None:
    """Fill the softmax's statistics ``[T, N, H]`` of every row."""
    work = walk.work
    tasks, N, H = log_sum.shape
    block_heads = next_power_of_2(H)
    lanes = max(8, 256 // block_heads)
    partials, num_heavy, num_light = work.hub_of_partial.numel(), work.heavy_row.numel(), work.light_row.numel()
    part = log_sum.new_empty(tasks, max(partials, 1), 3, H)
    acc = triton_acc(log_sum.dtype)
    _softmax_kernel[(num_heavy + -(-num_light // lanes), tasks)](
        src_T, dst_T, walk.indices, work.heavy_start, work.heavy_len, work.heavy_row, work.light_start, work.light_len,
        work.light_row, work.hub_row, work.hub_of_partial, log_sum, alpha_plus, part,
        num_heavy, num_light, partials, M, N, slope,
        H=H, S_SRC=stride_src, S_DST=stride_dst, ACC=acc, L=lanes, BH=block_heads, num_warps=2,
    )  # fmt: skip
    if partials:
        _merge_softmax_kernel[(work.hub_row.numel(), tasks)](
            part, work.hub_ptr, work.hub_row, log_sum, alpha_plus, partials, N,
            H=H, ACC=acc, L=16, BH=block_heads, num_warps=1,
        )  # fmt: skip


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
            L=launch.lanes, BH=launch.block_heads, BD=launch.block_width, num_warps=launch.num_warps,
        )  # fmt: skip
        if partials:
            add_hub_parts(part_x, work, grad_x.view(tasks, M, H * D))
            add_hub_parts(part_a, work, grad_a)
    return grad_x.reshape(x.shape), grad_a.reshape(a_src.shape)
