"""Triton kernels of ``gat.py``, forward: scores, softmax, dropout and weighted rows in one pass over the edges.

The softmax's shift is a bound of a row's scores that is known before (``gat_gather_triton.py``), so that a coefficient
is ``keep / (1 - rate) * exp(score - shift)`` at once, with the sign of the score's argument; a row's sums are divided by its
denominator in the end. If source scores are too far apart for the bound, every row finds its maximum first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.attention.gat_gather_triton import (
    GatherLaunch,
    choose_gather_launch,
    four_columns,
    four_edges,
    heads_of,
    lanes_of,
    leaky,
    row_of,
    score_bounds,
    spread_limit,
    store_softmax,
    weigh_four,
    wide_offsets,
    work_items,
)
from weft.ops.attention.gat_two_pass_triton import backward_in_two_passes, forward_in_two_passes, suits_one_pass
from weft.ops.csr.packed import PackedCSR
from weft.ops.csr.worklist import heavy_owner, heavy_row_span
from weft.ops.launch.backend import accumulate_dtype, limits_of, next_power_of_2
from weft.ops.launch.triton_lang import flatten_tasks, per_task_stride, tl, triton, triton_acc
from weft.ops.random_bits_triton import drop_key, keep_scale, mask_row
from weft.ops.sparse.lanes_triton import spaced_rows


@triton.jit
def _arguments(
    a_src, col, inside, head, in_head, dst, S_SRC: tl.constexpr, WIDE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The arguments of the leaky ReLU on edges ``[BR, 2, 2]``, and the mask ``[BR, BG, 2, 2]`` of those that exist."""
    seen = inside[:, None, :, :] & in_head[None, :, None, None]
    at = col.to(tl.int64 if WIDE else tl.int32)[:, None, :, :] * S_SRC + head[None, :, None, None]
    return tl.load(a_src + at, mask=seen, other=0.0).to(ACC) + dst[:, :, None, None], seen


@triton.jit
def _coefficients(
    a_src, edge, col, inside, head, in_head, dst, top, slope, key, fraction, total, positive,
    S_SRC: tl.constexpr, WIDE: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Signed coefficients ``[BR, BG, 2, 2]``, and what they add to the denominator and its positive part."""
    argument, seen = _arguments(a_src, col, inside, head, in_head, dst, S_SRC, WIDE, ACC)
    share = tl.where(seen, tl.exp(leaky(argument, slope) - top[:, :, None, None]), 0.0)
    kept = share
    if DROP:
        kept = share * keep_scale(mask_row(key, edge)[:, None, :, :], fraction, head[None, :, None, None]).to(ACC)
    up = argument > 0
    return tl.where(up, kept, -kept), total + share, positive + tl.where(up, share, 0.0)


@triton.jit
def _highest_of_row(
    a_src, a_dst, indices, row, start, length, head, in_head, slope,
    S_SRC: tl.constexpr, S_DST: tl.constexpr, ACC: tl.constexpr, BG: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """The highest score of one row ``[BG]``, SCAN edges at a time."""
    dst = tl.load(a_dst + row * S_DST + head, mask=in_head, other=0.0).to(ACC)
    highest = tl.full([SCAN, BG], float("-inf"), ACC)
    for first in range(0, length, SCAN):
        place = first + tl.arange(0, SCAN)
        col = tl.load(indices + start + place, mask=place < length, other=0).to(tl.int64)
        seen = (place < length)[:, None] & in_head[None, :]
        score = tl.load(a_src + col[:, None] * S_SRC + head[None, :], mask=seen, other=0.0).to(ACC) + dst[None, :]
        highest = tl.maximum(highest, tl.where(seen, leaky(score, slope), float("-inf")))
    return tl.max(highest, 0)


@triton.jit
def _attend_kernel(
    x, a_src, a_dst, bounds, rate, clock, indices,
    heavy_start, heavy_len, heavy_row, light_start, light_len, light_row, hub_row, hub_of_partial, hub_ptr,
    out, out_plus, log_sum, alpha_plus, part, part_sums, num_heavy, num_light, num_partial, M, N, slope, limit, site,
    stride_rate, stride_clock,
    H: tl.constexpr, D: tl.constexpr, S_X: tl.constexpr, S_SRC: tl.constexpr, S_DST: tl.constexpr,
    DROP: tl.constexpr, PLUS: tl.constexpr, WIDE: tl.constexpr, ACC: tl.constexpr,
    BR: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """A chunk of a hub writes its sums to ``part [2, T, P, H, D]``, and its shift (that of the whole hub), denominator
    and the denominator's positive part in ``part_sums [3, T, P, H]``."""
    piece = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    head, at, in_head, in_tile = heads_of(tl.program_id(1), H, D, BG, BD)
    x += task * M * S_X
    a_src += task * M * S_SRC
    a_dst += task * N * S_DST
    first, count, row, valid, step = lanes_of(
        piece, heavy_start, heavy_len, heavy_row, light_start, light_len, light_row, hub_row, hub_of_partial,
        num_heavy, num_light, num_partial, BR, WIDE,
    )  # fmt: skip
    longest = tl.max(count, 0)
    known = valid[:, None] & in_head[None, :]
    dst = tl.load(a_dst + row[:, None] * S_DST + head[None, :], mask=known, other=0.0).to(ACC)
    bound = tl.load(bounds + task * 2 * H + head, mask=in_head, other=0.0)
    spread = bound - tl.load(bounds + (task * 2 + 1) * H + head, mask=in_head, other=0.0)
    top = leaky(bound[None, :] + dst, slope)
    if tl.min((spread <= limit).to(tl.int32), 0) == 0:  # also if the spread is NaN
        own = tl.zeros([BR, BG], ACC)
        if piece < num_heavy:
            owner = heavy_owner(piece, heavy_row, hub_row, hub_of_partial, num_partial)
            start, length = heavy_row_span(piece, heavy_start, heavy_len, hub_ptr, hub_of_partial, num_partial)
            own += _highest_of_row(
                a_src, a_dst, indices, owner, start, length, head, in_head, slope, S_SRC, S_DST, ACC, BG, SCAN
            )[None, :]
        else:
            highest = tl.full([BR, BG, 2, 2], float("-inf"), ACC)
            for k in range(0, longest, 4):
                edge_seen, inside_seen = four_edges(first, k, step, count)
                col_seen = tl.load(indices + edge_seen, mask=inside_seen, other=0)
                argument, seen = _arguments(a_src, col_seen, inside_seen, head, in_head, dst, S_SRC, WIDE, ACC)
                highest = tl.maximum(highest, tl.where(seen, leaky(argument, slope), float("-inf")))
            own += tl.max(tl.max(highest, 3), 2)
        top = tl.where((spread <= limit)[None, :], top, own)
    top = tl.where(top == float("-inf"), 0.0, top)
    key, fraction = drop_key(clock, rate, task, site, stride_clock, stride_rate, DROP)
    acc = tl.zeros([BR, BG, BD], ACC)
    plus = tl.zeros([BR, BG, BD], ACC)
    totals = tl.zeros([BR, BG, 2, 2], ACC)
    positives = tl.zeros([BR, BG, 2, 2], ACC)
    edge, inside = four_edges(first, 0, step, count)
    col = tl.load(indices + edge, mask=inside, other=0)
    c, totals, positives = _coefficients(
        a_src, edge, col, inside, head, in_head, dst, top, slope, key, fraction, totals, positives,
        S_SRC, WIDE, DROP, ACC,
    )  # fmt: skip
    edge, inside = four_edges(first, 4, step, count)
    col = tl.load(indices + edge, mask=inside, other=0)
    col0, col1, col2, col3 = four_columns(indices, first, 0, step, count)
    for j in range(0, longest, 4):
        v0 = row_of(x, col0, j < count, at, in_tile, S_X, WIDE, ACC)
        v1 = row_of(x, col1, j + 1 < count, at, in_tile, S_X, WIDE, ACC)
        v2 = row_of(x, col2, j + 2 < count, at, in_tile, S_X, WIDE, ACC)
        v3 = row_of(x, col3, j + 3 < count, at, in_tile, S_X, WIDE, ACC)
        col0, col1, col2, col3 = four_columns(indices, first, j + 4, step, count)
        now = c
        edge, inside = four_edges(first, j + 4, step, count)
        c, totals, positives = _coefficients(
            a_src, edge, col, inside, head, in_head, dst, top, slope, key, fraction, totals, positives,
            S_SRC, WIDE, DROP, ACC,
        )  # fmt: skip
        edge, inside = four_edges(first, j + 8, step, count)
        col = tl.load(indices + edge, mask=inside, other=0)
        acc, plus = weigh_four(now, v0, v1, v2, v3, acc, plus, PLUS)
    total = tl.sum(tl.sum(totals, 3), 2)
    positive = tl.sum(tl.sum(positives, 3), 2)
    if piece < num_heavy:
        acc_one = tl.sum(acc, 0)
        plus_one = tl.sum(plus, 0)
        total_one = tl.sum(total, 0)
        positive_one = tl.sum(positive, 0)
        top_one = tl.max(top, 0)  # of all lanes, which are equal
        if piece < num_partial:
            chunks = tl.num_programs(2).to(tl.int64) * num_partial
            slot = task * num_partial + piece
            tl.store(part + slot * (H * D) + at, acc_one, mask=in_tile)
            if PLUS:
                tl.store(part + (chunks + slot) * (H * D) + at, plus_one, mask=in_tile)
            tl.store(part_sums + slot * H + head, top_one, mask=in_head)
            tl.store(part_sums + (chunks + slot) * H + head, total_one, mask=in_head)
            tl.store(part_sums + (2 * chunks + slot) * H + head, positive_one, mask=in_head)
        else:
            row_one = task * N + tl.load(heavy_row + piece)
            scale_one = store_softmax(
                log_sum, alpha_plus, row_one * H + head, in_head, top_one, total_one, positive_one
            )[:, None]
            place_one = row_one * (H * D) + at
            tl.store(out + place_one, (acc_one * scale_one).to(out.dtype.element_ty), mask=in_tile)
            if PLUS:
                tl.store(out_plus + place_one, (plus_one * scale_one).to(out.dtype.element_ty), mask=in_tile)
    else:
        row += task * N
        at_row = row[:, None] * H + head[None, :]
        scale = store_softmax(log_sum, alpha_plus, at_row, known, top, total, positive)[:, :, None]
        place = row[:, None, None] * (H * D) + at[None, :, :]
        mask = valid[:, None, None] & in_tile[None, :, :]
        tl.store(out + place, (acc * scale).to(out.dtype.element_ty), mask=mask)
        if PLUS:
            tl.store(out_plus + place, (plus * scale).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _attend_hubs_kernel(
    part, part_sums, hub_ptr, hub_row, out, out_plus, log_sum, alpha_plus, num_partial, N,
    H: tl.constexpr, D: tl.constexpr, PLUS: tl.constexpr, ACC: tl.constexpr,
    BP: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add the chunks of one hub, BP at a time and always in the same order, and finish its row."""
    hub = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    head, at, in_head, in_tile = heads_of(tl.program_id(1), H, D, BG, BD)
    chunks = tl.num_programs(2).to(tl.int64) * num_partial
    acc = tl.zeros([BP, BG, BD], ACC)
    plus = tl.zeros([BP, BG, BD], ACC)
    total = tl.zeros([BP, BG], ACC)
    positive = tl.zeros([BP, BG], ACC)
    begin = tl.load(hub_ptr + hub)
    last = tl.load(hub_ptr + hub + 1)
    for first in range(begin, last, BP):
        chunk = first + tl.arange(0, BP)
        slot = task * num_partial + chunk
        seen = (chunk < last)[:, None] & in_head[None, :]
        mask = (chunk < last)[:, None, None] & in_tile[None, :, :]
        acc += tl.load(part + slot[:, None, None] * (H * D) + at[None, :, :], mask=mask, other=0.0)
        if PLUS:
            plus += tl.load(part + (chunks + slot)[:, None, None] * (H * D) + at[None, :, :], mask=mask, other=0.0)
        total += tl.load(part_sums + (chunks + slot)[:, None] * H + head[None, :], mask=seen, other=0.0)
        positive += tl.load(part_sums + (2 * chunks + slot)[:, None] * H + head[None, :], mask=seen, other=0.0)
    row = task * N + tl.load(hub_row + hub)
    top = tl.load(part_sums + (task * num_partial + begin) * H + head, mask=in_head, other=0.0)
    total_one = tl.sum(total, 0)
    scale = store_softmax(log_sum, alpha_plus, row * H + head, in_head, top, total_one, tl.sum(positive, 0))
    place = row * (H * D) + at
    tl.store(out + place, (tl.sum(acc, 0) * scale[:, None]).to(out.dtype.element_ty), mask=in_tile)
    if PLUS:
        tl.store(out_plus + place, (tl.sum(plus, 0) * scale[:, None]).to(out.dtype.element_ty), mask=in_tile)


def attention_forward_triton(
    x: Tensor, a_src: Tensor, a_dst: Tensor, slope: float, rate: Tensor | None, clock: Tensor | None, site: int,
    csr: PackedCSR, training: bool, launch: GatherLaunch | None = None, limit: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``(out, out_plus, alpha_plus, log_sum)``; the second is left unwritten unless ``training``.

    ``limit``: the spread of source scores above which rows find their own maximum. A ``launch`` is for the one-pass kernel.
    """
    M, H, D = x.shape[-3:]
    N, lead, dtype = csr.num_rows, x.shape[:-3], accumulate_dtype(x.dtype)
    out, out_plus = x.new_empty(*lead, N, H, D), x.new_empty(*lead, N, H, D)
    alpha_plus, log_sum = x.new_empty(*lead, N, H, dtype=dtype), x.new_empty(*lead, N, H, dtype=dtype)
    if not out.numel():
        return out, out_plus, alpha_plus, log_sum
    if launch is None and not suits_one_pass(x.dtype, D, csr.num_edges * H, limits_of(x.device)):
        arguments = x, a_src, a_dst, slope, rate, clock, site, csr, training
        forward_in_two_passes(*arguments, (out, out_plus, alpha_plus, log_sum), limit)
        return out, out_plus, alpha_plus, log_sum
    (x, s_x), (a_src, s_src), (a_dst, s_dst) = spaced_rows(x, 2), spaced_rows(a_src, 1), spaced_rows(a_dst, 1)
    bounds = score_bounds(a_src, s_src, log_sum)
    work, tasks = csr.work, lead.numel()
    partials = work.hub_of_partial.numel()
    part = log_sum.new_empty(2 if training else 1, tasks, max(partials, 1), H * D)
    part_sums = log_sum.new_empty(3, tasks, max(partials, 1), H)
    launch = launch or choose_gather_launch(H, D)
    results = out, out_plus, log_sum, alpha_plus
    constants = {
        "H": H, "D": D, "PLUS": training, "ACC": triton_acc(x.dtype), "BG": launch.block_heads,
        "BD": launch.block_width,
    }  # fmt: skip
    _attend_kernel[launch.grid(csr, H, tasks)](
        x, a_src, a_dst, bounds, log_sum if rate is None else rate.contiguous(),
        log_sum if clock is None else clock.contiguous(), csr.indices, *work_items(csr), work.hub_ptr,
        *results, part, part_sums, work.heavy_row.numel(), work.light_row.numel(), partials, M, N,
        slope, spread_limit(x.dtype, slope) if limit is None else limit, site,
        per_task_stride(rate, tasks, 1), per_task_stride(clock, tasks, 2),
        S_X=s_x, S_SRC=s_src, S_DST=s_dst, DROP=rate is not None,
        WIDE=wide_offsets(M * max(s_x, s_src), csr.num_edges), BR=launch.block_rows, SCAN=64,
        num_warps=launch.num_warps, **constants,
    )  # fmt: skip
    if partials:
        _attend_hubs_kernel[(work.hub_row.numel(), -(-H // launch.block_heads), tasks)](
            part, part_sums, work.hub_ptr, work.hub_row, *results, partials, N,
            BP=launch.hub_parts, num_warps=4, **constants,
        )  # fmt: skip
    return out, out_plus, alpha_plus, log_sum


# ---- Triton kernels of ``gat.py``, backward: per-row statistics, then one pass over the transpose
#
# Rows are sources there, and gradients the rows that are gathered (``gat_gather_triton.py``). With ``mix = slope *
# acc + (1 - slope) * plus`` and the row's own ``x``
#     d x[j, h]     = acc[j, h]
#     d a_src[j, h] = <x[j, h], mix[j, h]> - sum over the out-edges of j of alpha * slope(e) * delta
#
# so that no product of two rows is taken on an edge.


@triton.jit
def _row_gradient_kernel(
    grad, out, out_plus, alpha_plus, a_dst, log_sum, stats, grad_a_dst, items, slope,
    H: tl.constexpr, D: tl.constexpr, S_DST: tl.constexpr, G_DST: tl.constexpr, SHARED: tl.constexpr, ACC: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Per row and head: delta, d a_dst, and the three numbers that the pass over the transpose reads together."""
    item = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)  # a row and a head
    row, head = item // H, item % H
    valid = item < items
    # Load one number per item first; after the sums it would wait for them.
    share = tl.load(alpha_plus + item, mask=valid, other=0.0)
    score = tl.load(a_dst + row * S_DST + head, mask=valid, other=0.0).to(ACC)
    lse = tl.load(log_sum + item, mask=valid, other=0.0)
    all_of = tl.zeros([BN, BD], ACC)
    plus_of = tl.zeros([BN, BD], ACC)
    for first in tl.static_range(0, D, BD):
        d = first + tl.arange(0, BD)
        mask = valid[:, None] & (d < D)[None, :]
        at = item[:, None] * D + d[None, :]
        at_grad = row[:, None] * D + d[None, :] if SHARED else at
        g = tl.load(grad + at_grad, mask=mask, other=0.0).to(ACC)
        all_of += g * tl.load(out + at, mask=mask, other=0.0).to(ACC)
        plus_of += g * tl.load(out_plus + at, mask=mask, other=0.0).to(ACC)
    delta = tl.sum(all_of, 1)
    d_dst = (1.0 - slope) * (tl.sum(plus_of, 1) - delta * share)
    tl.store(grad_a_dst + row * G_DST + head, d_dst.to(grad_a_dst.dtype.element_ty), mask=valid)
    at_stats = row * (3 * H) + head
    tl.store(stats + at_stats, score, mask=valid)
    tl.store(stats + at_stats + H, lse, mask=valid)
    tl.store(stats + at_stats + 2 * H, delta, mask=valid)


def one_head(grad: Tensor) -> tuple[Tensor, bool]:
    """``(grad [..., N, D], True)`` if all heads share one row, as they do after a sum over heads.

    Otherwise ``(contiguous grad [..., N, H, D], False)``.
    """
    if grad.shape[-2] > 1 and grad.stride(-2) == 0 and grad.select(-2, 0).is_contiguous():
        return grad.select(-2, 0), True
    return grad.contiguous(), False


def attention_row_gradient_triton(
    grad: Tensor, out: Tensor, out_plus: Tensor, alpha_plus: Tensor, a_dst: Tensor, log_sum: Tensor, slope: float,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(stats [..., N, 3, H], grad_a_dst [..., N, H])``; stats are a_dst, log_sum and delta = <grad, out>.

    The gradient is written ``into`` columns of a wider matrix if they are given.
    """
    H, D = grad.shape[-2:]
    stats = log_sum.new_empty(*log_sum.shape[:-1], 3, H)
    grad_a_dst = torch.empty_like(a_dst, memory_format=torch.contiguous_format) if into is None else into
    rows = log_sum.numel() // H
    if rows:
        grad, shared = one_head(grad)
        (a_dst, s_dst), (_, g_dst) = spaced_rows(a_dst, 1), spaced_rows(grad_a_dst, 1)
        # All features of a head at a time, a thousand elements per tile. A head of 40 is padded to 64; five steps of 8
        # would leave no lane idle, but the loads of neighbouring lanes would no longer be coalesced. Not measured.
        width = next_power_of_2(D)
        items = max(1, 1024 // width)
        _row_gradient_kernel[(-(-rows * H // items),)](
            grad, out, out_plus, alpha_plus, a_dst, log_sum, stats, grad_a_dst, rows * H, slope,
            H=H, D=D, S_DST=s_dst, G_DST=g_dst, SHARED=shared, ACC=triton_acc(grad.dtype),
            BN=items, BD=width, num_warps=4,
        )  # fmt: skip
    return stats, grad_a_dst


@triton.jit
def _coefficients_back(
    stats, perm, edge, col, inside, head, in_head, src, slope, key, fraction, lost,
    H: tl.constexpr, WIDE: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Signed coefficients ``[BR, BG, 2, 2]`` of edges of the transpose, and their part of the loss term of d a_src."""
    h = head[None, :, None, None]
    seen = inside[:, None, :, :] & in_head[None, :, None, None]
    # A row of statistics is three runs of H: one statistic of all heads is contiguous.
    at = col.to(tl.int64 if WIDE else tl.int32)[:, None, :, :] * (3 * H) + h
    dst = tl.load(stats + at, mask=seen, other=0.0)
    lse = tl.load(stats + at + H, mask=seen, other=0.0)
    delta = tl.load(stats + at + 2 * H, mask=seen, other=0.0)
    argument = src[:, :, None, None] + dst
    alpha = tl.where(seen, tl.exp(leaky(argument, slope) - lse), 0.0)
    kept = alpha
    if DROP:
        position = tl.load(perm + edge, mask=inside, other=0)
        kept = alpha * keep_scale(mask_row(key, position)[:, None, :, :], fraction, h).to(ACC)
    up = argument > 0
    return tl.where(up, kept, -kept), lost + tl.where(up, alpha, alpha * slope) * delta


@triton.jit
def _attend_back_kernel(
    grad, own, a_src, stats, rate, clock, indices, perm,
    heavy_start, heavy_len, heavy_row, light_start, light_len, light_row, hub_row, hub_of_partial,
    out, grad_a, part, part_lost, num_heavy, num_light, num_partial, M, N, slope, site, stride_rate, stride_clock,
    H: tl.constexpr, D: tl.constexpr, S_GRAD: tl.constexpr, S_OWN: tl.constexpr, S_SRC: tl.constexpr,
    S_OUT: tl.constexpr, S_A: tl.constexpr, SHARED: tl.constexpr, DROP: tl.constexpr, WIDE: tl.constexpr,
    ACC: tl.constexpr, BR: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """M sources are rows, N destinations columns. A chunk of a hub writes ``acc`` and ``mix`` to ``part [2, T, P, H, D]``."""
    piece = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    head, at, in_head, in_tile = heads_of(tl.program_id(1), H, D, BG, BD)
    at_grad = at
    if SHARED:  # a row of one head: the same places for every head
        at_grad = (head * 0)[:, None] + tl.arange(0, BD)[None, :]
    grad += task * N * S_GRAD
    stats += task * N * (3 * H)
    own += task * M * S_OWN
    a_src += task * M * S_SRC
    out += task * M * S_OUT
    grad_a += task * M * S_A
    first, count, row, valid, step = lanes_of(
        piece, heavy_start, heavy_len, heavy_row, light_start, light_len, light_row, hub_row, hub_of_partial,
        num_heavy, num_light, num_partial, BR, WIDE,
    )  # fmt: skip
    known = valid[:, None] & in_head[None, :]
    src = tl.load(a_src + row[:, None] * S_SRC + head[None, :], mask=known, other=0.0).to(ACC)
    key, fraction = drop_key(clock, rate, task, site, stride_clock, stride_rate, DROP)
    acc = tl.zeros([BR, BG, BD], ACC)
    plus = tl.zeros([BR, BG, BD], ACC)
    losses = tl.zeros([BR, BG, 2, 2], ACC)
    edge, inside = four_edges(first, 0, step, count)
    col = tl.load(indices + edge, mask=inside, other=0)
    c, losses = _coefficients_back(
        stats, perm, edge, col, inside, head, in_head, src, slope, key, fraction, losses, H, WIDE, DROP, ACC
    )
    edge, inside = four_edges(first, 4, step, count)
    col = tl.load(indices + edge, mask=inside, other=0)
    col0, col1, col2, col3 = four_columns(indices, first, 0, step, count)
    for j in range(0, tl.max(count, 0), 4):
        v0 = row_of(grad, col0, j < count, at_grad, in_tile, S_GRAD, WIDE, ACC)
        v1 = row_of(grad, col1, j + 1 < count, at_grad, in_tile, S_GRAD, WIDE, ACC)
        v2 = row_of(grad, col2, j + 2 < count, at_grad, in_tile, S_GRAD, WIDE, ACC)
        v3 = row_of(grad, col3, j + 3 < count, at_grad, in_tile, S_GRAD, WIDE, ACC)
        col0, col1, col2, col3 = four_columns(indices, first, j + 4, step, count)
        now = c
        edge, inside = four_edges(first, j + 4, step, count)
        c, losses = _coefficients_back(
            stats, perm, edge, col, inside, head, in_head, src, slope, key, fraction, losses, H, WIDE, DROP, ACC
        )
        edge, inside = four_edges(first, j + 8, step, count)
        col = tl.load(indices + edge, mask=inside, other=0)
        acc, plus = weigh_four(now, v0, v1, v2, v3, acc, plus, True)
    mix = slope * acc + (1.0 - slope) * plus
    lost = tl.sum(tl.sum(losses, 3), 2)
    if piece < num_heavy:
        acc_one = tl.sum(acc, 0)
        mix_one = tl.sum(mix, 0)
        lost_one = tl.sum(lost, 0)
        if piece < num_partial:
            slot = task * num_partial + piece
            chunks = tl.num_programs(2).to(tl.int64) * num_partial
            tl.store(part + slot * (H * D) + at, acc_one, mask=in_tile)
            tl.store(part + (chunks + slot) * (H * D) + at, mix_one, mask=in_tile)
            tl.store(part_lost + slot * H + head, lost_one, mask=in_head)
        else:
            row_one = tl.load(heavy_row + piece).to(tl.int64)
            mine_one = tl.load(own + row_one * S_OWN + at, mask=in_tile, other=0.0).to(ACC)
            gain_one = tl.sum(mine_one * mix_one, 1) - lost_one
            tl.store(out + row_one * S_OUT + at, acc_one.to(out.dtype.element_ty), mask=in_tile)
            tl.store(grad_a + row_one * S_A + head, gain_one.to(grad_a.dtype.element_ty), mask=in_head)
    else:
        mask = valid[:, None, None] & in_tile[None, :, :]
        mine = tl.load(own + row[:, None, None] * S_OWN + at[None, :, :], mask=mask, other=0.0).to(ACC)
        gain = tl.sum(mine * mix, 2) - lost
        tl.store(out + row[:, None, None] * S_OUT + at[None, :, :], acc.to(out.dtype.element_ty), mask=mask)
        tl.store(grad_a + row[:, None] * S_A + head[None, :], gain.to(grad_a.dtype.element_ty), mask=known)


@triton.jit
def _attend_back_hubs_kernel(
    part, part_lost, hub_ptr, hub_row, own, out, grad_a, num_partial, M,
    H: tl.constexpr, D: tl.constexpr, S_OWN: tl.constexpr, S_OUT: tl.constexpr, S_A: tl.constexpr, ACC: tl.constexpr,
    BP: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add the chunks of one hub, BP at a time and always in the same order, and finish its row."""
    hub = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    head, at, in_head, in_tile = heads_of(tl.program_id(1), H, D, BG, BD)
    chunks = tl.num_programs(2).to(tl.int64) * num_partial
    acc = tl.zeros([BP, BG, BD], ACC)
    mix = tl.zeros([BP, BG, BD], ACC)
    lost = tl.zeros([BP, BG], ACC)
    last = tl.load(hub_ptr + hub + 1)
    for first in range(tl.load(hub_ptr + hub), last, BP):
        chunk = first + tl.arange(0, BP)
        slot = task * num_partial + chunk
        mask = (chunk < last)[:, None, None] & in_tile[None, :, :]
        acc += tl.load(part + slot[:, None, None] * (H * D) + at[None, :, :], mask=mask, other=0.0)
        mix += tl.load(part + (chunks + slot)[:, None, None] * (H * D) + at[None, :, :], mask=mask, other=0.0)
        seen = (chunk < last)[:, None] & in_head[None, :]
        lost += tl.load(part_lost + slot[:, None] * H + head[None, :], mask=seen, other=0.0)
    row = task * M + tl.load(hub_row + hub)
    mine = tl.load(own + row * S_OWN + at, mask=in_tile, other=0.0).to(ACC)
    gain = tl.sum(mine * tl.sum(mix, 0), 1) - tl.sum(lost, 0)
    tl.store(out + row * S_OUT + at, tl.sum(acc, 0).to(out.dtype.element_ty), mask=in_tile)
    tl.store(grad_a + row * S_A + head, gain.to(grad_a.dtype.element_ty), mask=in_head)


def attention_backward_triton(
    grad: Tensor, x: Tensor, a_src: Tensor, stats: Tensor, slope: float, rate: Tensor | None, clock: Tensor | None,
    site: int, back: PackedCSR, launch: GatherLaunch | None = None, into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(grad_x [..., M, H, D], grad_a_src [..., M, H])`` by the transpose, written ``into`` if given."""
    M, H, D = x.shape[-3:]
    contiguous = torch.contiguous_format
    grad_x, grad_a = into or (
        torch.empty_like(x, memory_format=contiguous),
        torch.empty_like(a_src, memory_format=contiguous),
    )
    if not grad_x.numel():
        return grad_x, grad_a
    grad, shared = one_head(grad)
    if launch is None and not suits_one_pass(x.dtype, D, back.num_edges * H, limits_of(x.device)):
        backward_in_two_passes(grad, shared, x, a_src, stats, slope, rate, clock, site, back, grad_x, grad_a)
        return grad_x, grad_a
    work, tasks, N, stats = back.work, x.shape[:-3].numel(), stats.shape[-3], flatten_tasks(stats, 3)
    s_grad = D if shared else H * D
    (x, s_x), (a_src, s_src) = spaced_rows(x, 2), spaced_rows(a_src, 1)
    (_, g_x), (_, g_src) = spaced_rows(grad_x, 2), spaced_rows(grad_a, 1)
    partials = work.hub_of_partial.numel()
    part, part_lost = stats.new_empty(2, tasks, max(partials, 1), H * D), stats.new_empty(tasks, max(partials, 1), H)
    launch = launch or choose_gather_launch(H, D, shared)
    constants = {
        "H": H, "D": D, "S_OWN": s_x, "S_OUT": g_x, "S_A": g_src, "ACC": triton_acc(stats.dtype),
        "BG": launch.block_heads, "BD": launch.block_width,
    }  # fmt: skip
    _attend_back_kernel[launch.grid(back, H, tasks)](
        grad, x, a_src, stats, stats if rate is None else rate.contiguous(),
        stats if clock is None else clock.contiguous(), back.indices, back.perm, *work_items(back),
        grad_x, grad_a, part, part_lost, work.heavy_row.numel(), work.light_row.numel(), partials, M, N,
        slope, site, per_task_stride(rate, tasks, 1), per_task_stride(clock, tasks, 2),
        S_GRAD=s_grad, S_SRC=s_src, SHARED=shared, DROP=rate is not None,
        WIDE=wide_offsets(N * max(s_grad, 3 * H), back.num_edges), BR=launch.block_rows, num_warps=launch.num_warps,
        **constants,
    )  # fmt: skip
    if partials:
        _attend_back_hubs_kernel[(work.hub_row.numel(), -(-H // launch.block_heads), tasks)](
            part, part_lost, work.hub_ptr, work.hub_row, x, grad_x, grad_a, partials, M,
            BP=launch.hub_parts, num_warps=4, **constants,
        )  # fmt: skip
    return grad_x, grad_a
