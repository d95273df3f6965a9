"""Triton kernels of ``gat.py``, forward: scores, softmax, dropout and weighted rows in one pass over the edges.

The softmax's shift is a bound of a row's scores that is known before (``gat_score_bounds_triton.py``), so that a coefficient
is ``keep / (1 - rate) * exp(score - shift)`` at once, with the sign of the score's argument; a row's sums are divided by its
denominator in the end. If source scores are too far apart for the bound, every row finds its maximum first.
"""

from __future__ import annotations

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
    weigh_four,
    wide_offsets,
    work_items,
)
from weft.ops.attention.gat_score_bounds_triton import score_bounds, spread_limit
from weft.ops.attention.gat_two_pass_triton import forward_in_two_passes, suits_one_pass
from weft.ops.csr.packed import PackedCSR
from weft.ops.csr.worklist_triton import heavy_owner, heavy_row_span
from weft.ops.launch.backend import accumulate_dtype
from weft.ops.launch.device_limits import limits_of
from weft.ops.launch.launch import per_task_stride, triton_acc
from weft.ops.launch.triton_lang import tl, triton
from weft.ops.random.triton_bits import keep_scale, mask_row, mix_key
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
def _store_softmax(log_sum, alpha_plus, at, mask, top, total, positive):
    """A row's results from its denominator, and the inverse; for a row without edges 0, 0 and 1."""
    some = total != 0  # a NaN denominator stays NaN
    safe = tl.where(some, total, 1.0)
    tl.store(log_sum + at, tl.where(some, top + tl.log(safe), 0.0), mask=mask)
    tl.store(alpha_plus + at, positive / safe, mask=mask)
    return 1.0 / safe


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
    key = tl.zeros([], tl.uint64)
    fraction = tl.zeros([], tl.float32)
    if DROP:
        key = mix_key(clock + task * stride_clock, site)
        fraction = tl.load(rate + task * stride_rate).to(tl.float32)
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
            scale_one = _store_softmax(
                log_sum, alpha_plus, row_one * H + head, in_head, top_one, total_one, positive_one
            )[:, None]
            place_one = row_one * (H * D) + at
            tl.store(out + place_one, (acc_one * scale_one).to(out.dtype.element_ty), mask=in_tile)
            if PLUS:
                tl.store(out_plus + place_one, (plus_one * scale_one).to(out.dtype.element_ty), mask=in_tile)
    else:
        row += task * N
        at_row = row[:, None] * H + head[None, :]
        scale = _store_softmax(log_sum, alpha_plus, at_row, known, top, total, positive)[:, :, None]
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
    scale = _store_softmax(log_sum, alpha_plus, row * H + head, in_head, top, total_one, tl.sum(positive, 0))
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
        given = x, a_src, a_dst, slope, rate, clock, site, csr, training
        forward_in_two_passes(*given, (out, out_plus, alpha_plus, log_sum), limit)
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
