"""Launchers of ``gat.py`` in two passes: coefficients ``[E, H]`` first, then the weighted rows.

One pass (``gat_triton.py``) is faster where a head fills its lanes: 0.179 and
0.150 ms on an H200 against 0.233 and 0.225 (arxiv shape, 4 heads of 16, float32). It pads every head to a power of two, and
in half precision a thread of it loads 8 bytes at a time. Here a head is split into groups that fill the lanes: an epoch
of a GAT with heads of 40 in its last layer takes 2.31 ms per task with that layer in two passes and 2.50 in one, and in
bfloat16 1.55 against 1.85 (16 tasks). If the coefficients do not stay in the cache, one pass is faster: on the products
shape, with heads of 47, it took 96 ms and two passes 119.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from weft.ops.attention.gat_gather_triton import leaky, score_bounds, spread_limit, store_softmax, work_items
from weft.ops.csr.packed import PackedCSR
from weft.ops.csr.worklist import heavy_owner, heavy_piece, heavy_row_span, light_rows
from weft.ops.launch.backend import H200, DeviceLimits, accumulate_dtype, next_power_of_2
from weft.ops.launch.triton_lang import flatten_tasks, per_task_stride, tl, triton, triton_acc
from weft.ops.random_bits_triton import drop_key, keep_scale, mask_row
from weft.ops.sparse.lanes_triton import add_hub_parts, spaced_rows

# ---- Triton kernels of ``gat.py`` in two passes, first pass: the softmax's coefficients, one number per edge and
# head
#
# Scores, exponentials and the bits of dropout cost as much for a head of 16 features as for one of 1; inside the loop
# that gathers rows every thread along the features would repeat them. Here a thread handles one edge and head. The
# result is ``[E, H]``, small compared with the rows: ``keep / (1 - rate) * alpha``, with the sign of the score's
# argument (the leaky slope takes two values, and both directions need to know which). Coefficients have the type of
# the rows that they weight: in half precision they are rounded as those are, and the sums are float32's.
#
# Forward, ``alpha`` is only ``exp(score - shift)``: the pass that writes the coefficients adds up the denominator,
# and the pass that weights rows with them divides a row's sums by it. The shift is a bound of the row's scores,
# computed before (``gat_gather_triton.py``); if source scores are too far apart for it, every row finds its
# maximum first.
#
# Tiles are ``[L, U, BH]``: lanes, edges and heads. A lane is a light row that meets U of its edges at a time, so that
# what it reads and writes of them lies side by side; in a heavy row all lanes take edges of the same row (see
# ``worklist.py``).


@triton.jit
def _arguments(a_src, indices, edge, inside, dst, h, H, S_SRC: tl.constexpr, ACC: tl.constexpr):
    """The arguments of the leaky ReLU on the edges ``[L, U]``, and the mask ``[L, U, BH]`` of those that exist."""
    col = tl.load(indices + edge, mask=inside, other=0).to(tl.int64)
    seen = inside[:, :, None] & (h < H)[None, None, :]
    return tl.load(a_src + col[:, :, None] * S_SRC + h[None, None, :], mask=seen, other=0.0).to(ACC) + dst, seen


@triton.jit
def _highest(
    a_src, indices, edge, inside, dst, h, H, slope, top, S_SRC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The scores of edges ``[L, U]`` into a running maximum."""
    argument, seen = _arguments(a_src, indices, edge, inside, dst, h, H, S_SRC, ACC)
    return tl.maximum(top, tl.where(seen, leaky(argument, slope), float("-inf")))


@triton.jit
def _write(
    a_src, indices, out, edge, inside, dst, top, h, H, slope, key, rate, total, plus,
    S_SRC: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The signed coefficients of edges ``[L, U]``, and what they add to the denominator and its positive part."""
    argument, seen = _arguments(a_src, indices, edge, inside, dst, h, H, S_SRC, ACC)
    share = tl.where(seen, tl.exp(leaky(argument, slope) - top), 0.0)
    kept = share
    if DROP:
        kept = share * keep_scale(mask_row(key, edge)[:, :, None], rate, h[None, None, :]).to(ACC)
    at = edge[:, :, None] * H + h[None, None, :]
    tl.store(out + at, tl.where(argument > 0, kept, -kept).to(out.dtype.element_ty), mask=seen)
    return total + share, plus + tl.where(argument > 0, share, 0.0)


@triton.jit
def _any_far(spread, limit):
    """Whether a spread is not below the limit, or NaN."""
    return tl.min((spread <= limit).to(tl.int32), 0) == 0


@triton.jit
def _store_rows(log_sum, alpha_plus, inverse, at, mask, top, total, plus):
    """A row's results from its denominator; for a row without edges 0, 0 and 1."""
    tl.store(inverse + at, store_softmax(log_sum, alpha_plus, at, mask, top, total, plus), mask=mask)


@triton.jit
def _coefficients_kernel(
    a_src, a_dst, bounds, rate, clock, indices,
    heavy_start, heavy_len, heavy_row, light_start, light_len, light_row, hub_row, hub_of_partial, hub_ptr,
    out, log_sum, alpha_plus, inverse, part, num_heavy, num_light, num_partial, M, N, E, slope, limit, site,
    stride_rate, stride_clock,
    H: tl.constexpr, S_SRC: tl.constexpr, S_DST: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr,
    L: tl.constexpr, U: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Coefficients in the order of the edges, relative to a shift: the row's bound or, if it is too loose, its maximum.

    A chunk of a hub writes its shift (that of the whole hub), denominator and positive part to ``part [3, T, P, H]``.
    """
    piece = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    lane = tl.arange(0, L)
    u = tl.arange(0, U)
    a_src += task * M * S_SRC
    a_dst += task * N * S_DST
    out += task * E * H
    log_sum += task * N * H
    alpha_plus += task * N * H
    inverse += task * N * H
    key, fraction = drop_key(clock, rate, task, site, stride_clock, stride_rate, DROP)
    bound = tl.load(bounds + task * 2 * H + h, mask=h < H, other=0.0)
    spread = bound - tl.load(bounds + (task * 2 + 1) * H + h, mask=h < H, other=0.0)
    total = tl.zeros([L, U, BH], ACC)
    plus = tl.zeros([L, U, BH], ACC)
    if piece < num_heavy:
        start_one, length_one = heavy_piece(piece, heavy_start, heavy_len)
        row_one = heavy_owner(piece, heavy_row, hub_row, hub_of_partial, num_partial)
        dst_one = tl.load(a_dst + row_one * S_DST + h, mask=h < H, other=0.0).to(ACC)[None, None, :]
        top_one = leaky(bound[None, None, :] + dst_one, slope)
        if _any_far(spread, limit):
            own_one = tl.full([L, U, BH], float("-inf"), ACC)
            start_row, length_row = heavy_row_span(piece, heavy_start, heavy_len, hub_ptr, hub_of_partial, num_partial)
            for first_seen in range(0, length_row, L * U):
                place_seen = first_seen + lane[:, None] * U + u[None, :]
                own_one = _highest(
                    a_src, indices, start_row + place_seen, place_seen < length_row, dst_one, h, H, slope, own_one,
                    S_SRC, ACC,
                )  # fmt: skip
            top_one = tl.where((spread <= limit)[None, None, :], top_one, tl.max(tl.max(own_one, 1), 0)[None, None, :])
        top_one = tl.where(top_one == float("-inf"), 0.0, top_one)
        for first in range(0, length_one, L * U):
            place = first + lane[:, None] * U + u[None, :]
            total, plus = _write(
                a_src, indices, out, start_one + place, place < length_one, dst_one, top_one, h, H, slope, key,
                fraction, total, plus, S_SRC, DROP, ACC,
            )  # fmt: skip
        total_one = tl.sum(tl.sum(total, 1), 0)
        plus_one = tl.sum(tl.sum(plus, 1), 0)
        shift_one = tl.sum(tl.sum(top_one, 1), 0)  # of one element: without its axes
        if piece < num_partial:
            at = (task * num_partial + piece) * H + h
            size = tl.num_programs(2).to(tl.int64) * num_partial * H
            tl.store(part + at, shift_one, mask=h < H)
            tl.store(part + size + at, total_one, mask=h < H)
            tl.store(part + 2 * size + at, plus_one, mask=h < H)
        else:
            _store_rows(log_sum, alpha_plus, inverse, row_one * H + h, h < H, shift_one, total_one, plus_one)
    else:
        item = (piece - num_heavy) * L + lane
        start, length, row, valid = light_rows(item, light_start, light_len, light_row, num_light)
        seen = valid[:, None] & (h < H)[None, :]
        dst = tl.load(a_dst + row[:, None] * S_DST + h[None, :], mask=seen, other=0.0).to(ACC)[:, None, :]
        top = leaky(bound[None, None, :] + dst, slope)
        if _any_far(spread, limit):
            own = tl.full([L, U, BH], float("-inf"), ACC)
            for step_seen in range(0, tl.max(length, 0), U):
                now_seen = step_seen + u[None, :]
                own = _highest(
                    a_src, indices, start[:, None] + now_seen, now_seen < length[:, None], dst, h, H, slope, own,
                    S_SRC, ACC,
                )  # fmt: skip
            top = tl.where((spread <= limit)[None, None, :], top, tl.max(own, 1)[:, None, :])
        top = tl.where(top == float("-inf"), 0.0, top)
        for step in range(0, tl.max(length, 0), U):
            now = step + u[None, :]
            total, plus = _write(
                a_src, indices, out, start[:, None] + now, now < length[:, None], dst, top, h, H, slope, key, fraction,
                total, plus, S_SRC, DROP, ACC,
            )  # fmt: skip
        at_row = row[:, None] * H + h[None, :]
        _store_rows(log_sum, alpha_plus, inverse, at_row, seen, tl.sum(top, 1), tl.sum(total, 1), tl.sum(plus, 1))


@triton.jit
def _add_chunks_kernel(
    part, hub_ptr, hub_row, log_sum, alpha_plus, inverse, num_partial, N,
    H: tl.constexpr, ACC: tl.constexpr, L: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Add the chunks of one hub, L at a time and always in the same order."""
    hub = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    size = tl.num_programs(2).to(tl.int64) * num_partial * H
    total = tl.zeros([L, BH], ACC)
    plus = tl.zeros([L, BH], ACC)
    begin = tl.load(hub_ptr + hub)
    last = tl.load(hub_ptr + hub + 1)
    for first in range(begin, last, L):
        slot = first + tl.arange(0, L)
        seen = (slot < last)[:, None] & (h < H)[None, :]
        at = (task * num_partial + slot)[:, None] * H + h[None, :]
        total += tl.load(part + size + at, mask=seen, other=0.0)
        plus += tl.load(part + 2 * size + at, mask=seen, other=0.0)
    top = tl.load(part + (task * num_partial + begin) * H + h, mask=h < H, other=0.0)
    at_row = (task * N + tl.load(hub_row + hub).to(tl.int64)) * H + h
    _store_rows(log_sum, alpha_plus, inverse, at_row, h < H, top, tl.sum(total, 0), tl.sum(plus, 0))


@triton.jit
def _write_back(
    stats, indices, perm, out, edge, inside, src, h, H, slope, key, rate, total,
    DROP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The signed coefficients of edges ``[L, U]`` of the transpose, and their part of the loss term of d a_src."""
    col = tl.load(indices + edge, mask=inside, other=0).to(tl.int64)
    seen = inside[:, :, None] & (h < H)[None, None, :]
    # A row of statistics is three runs of H: an edge's four heads of one kind are one load.
    at = col[:, :, None] * (3 * H) + h[None, None, :]
    argument = src + tl.load(stats + at, mask=seen, other=0.0)
    lse = tl.load(stats + at + H, mask=seen, other=0.0)
    delta = tl.load(stats + at + 2 * H, mask=seen, other=0.0)
    alpha = tl.exp(tl.where(argument > 0, argument, argument * slope) - lse)
    kept = alpha
    if DROP:
        position = tl.load(perm + edge, mask=inside, other=0).to(tl.int64)
        kept = alpha * keep_scale(mask_row(key, position)[:, :, None], rate, h[None, None, :]).to(ACC)
    signed = tl.where(argument > 0, kept, -kept).to(out.dtype.element_ty)
    tl.store(out + edge[:, :, None] * H + h[None, None, :], signed, mask=seen)
    return total + tl.where(seen, tl.where(argument > 0, alpha, alpha * slope) * delta, 0.0)


@triton.jit
def _coefficients_back_kernel(
    stats, a_src, rate, clock, indices, perm,
    heavy_start, heavy_len, heavy_row, light_start, light_len, light_row, hub_row, hub_of_partial,
    out, loss, part, num_heavy, num_light, num_partial, M, N, E, slope, site, stride_rate, stride_clock,
    H: tl.constexpr, S_SRC: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr,
    L: tl.constexpr, U: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Coefficients in the order of the transpose's edges: rows are sources (M of them), columns destinations (N)."""
    piece = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    lane = tl.arange(0, L)
    u = tl.arange(0, U)
    stats += task * N * H * 3
    a_src += task * M * S_SRC
    out += task * E * H
    loss += task * M * H
    key, fraction = drop_key(clock, rate, task, site, stride_clock, stride_rate, DROP)
    total = tl.zeros([L, U, BH], ACC)
    if piece < num_heavy:
        start_one, length_one = heavy_piece(piece, heavy_start, heavy_len)
        row_one = heavy_owner(piece, heavy_row, hub_row, hub_of_partial, num_partial)
        src_one = tl.load(a_src + row_one * S_SRC + h, mask=h < H, other=0.0).to(ACC)[None, None, :]
        for first in range(0, length_one, L * U):
            place = first + lane[:, None] * U + u[None, :]
            total = _write_back(
                stats, indices, perm, out, start_one + place, place < length_one, src_one, h, H, slope, key, fraction,
                total, DROP, ACC,
            )  # fmt: skip
        total_one = tl.sum(tl.sum(total, 1), 0)
        if piece < num_partial:
            tl.store(part + (task * num_partial + piece) * H + h, total_one, mask=h < H)
        else:
            tl.store(loss + row_one * H + h, total_one, mask=h < H)
    else:
        item = (piece - num_heavy) * L + lane
        start, length, row, valid = light_rows(item, light_start, light_len, light_row, num_light)
        seen = valid[:, None] & (h < H)[None, :]
        src = tl.load(a_src + row[:, None] * S_SRC + h[None, :], mask=seen, other=0.0).to(ACC)[:, None, :]
        for step in range(0, tl.max(length, 0), U):
            now = step + u[None, :]
            total = _write_back(
                stats, indices, perm, out, start[:, None] + now, now < length[:, None], src, h, H, slope, key, fraction,
                total, DROP, ACC,
            )  # fmt: skip
        tl.store(loss + row[:, None] * H + h[None, :], tl.sum(total, 1), mask=seen)


def _coefficient_tile(heads: int, lanes: int, warps: int) -> dict[str, int]:
    """Few warps, one thread per edge with four heads.

    Measured on an H200 (arxiv shape, 4 heads): forward 0.052 ms (with given denominators), backward 0.069.
    """
    return {"L": lanes, "U": 8, "BH": min(8, next_power_of_2(heads)), "num_warps": warps}


STORED_LIMIT = {torch.float16: 4.0}  # exp(-4) is a float16 with full precision


def _grid(csr: PackedCSR, heads: int, tile: dict[str, int], tasks: int) -> tuple[int, int, int]:
    heavy, light = csr.work.heavy_row.numel(), csr.work.light_row.numel()
    return heavy + -(-light // tile["L"]), -(-heads // tile["BH"]), tasks


# ---- Triton kernels of ``gat.py`` in two passes, second pass: rows gathered along the edges, times the coefficients
#     acc[i]  = sum over e of |c[e, h]|        * v[j, h, :]
#     plus[i] = sum over e of max(c[e, h], 0)  * v[j, h, :]        edges with a positive argument only
#
# Forward, these times ``inverse[i, h]`` (one over the softmax's denominator, which the coefficients lack) are the
# layer's output and the part of it that ``d a_dst`` needs. Backward, over the transpose with gradients as rows,
# ``acc`` is ``d x`` and with the row's own ``x``
#     d a_src[j, h] = <x[j, h], slope * acc + (1 - slope) * plus> - loss[j, h]
#
# so no product of two rows is taken per edge. A row of H heads of D features is split into G *groups* of BD features,
# PER_HEAD per head; a tile is ``[BR, BG, BD]``: rows (or edges of one heavy row), groups, features.


@triton.jit
def _meet(
    value, coefficient, indices, edge, inside, head, at, in_tile, in_group, acc, plus,
    H: tl.constexpr, S_V: tl.constexpr, PLUS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One edge per lane: ``at [BG, BD]`` is the place in a row, ``head [BG]`` the head of its coefficient."""
    col = tl.load(indices + edge, mask=inside, other=0).to(tl.int64)
    mask_g = inside[:, None] & in_group[None, :]
    c = tl.load(coefficient + edge[:, None] * H + head[None, :], mask=mask_g, other=0.0).to(ACC)
    mask = inside[:, None, None] & in_tile[None, :, :]
    v = tl.load(value + col[:, None, None] * S_V + at[None, :, :], mask=mask, other=0.0).to(ACC)
    acc += tl.abs(c)[:, :, None] * v
    if PLUS:
        plus += tl.maximum(c, 0.0)[:, :, None] * v
    return acc, plus


@triton.jit
def _finish(
    own, loss, inverse, out, out_plus, grad_a, row, valid, group, head, at, in_tile, in_group, acc, plus, slope,
    G: tl.constexpr, PER_HEAD: tl.constexpr, S_OWN: tl.constexpr, S_OUT: tl.constexpr, S_A: tl.constexpr,
    H: tl.constexpr, BACKWARD: tl.constexpr, PLUS: tl.constexpr, SCALED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Store rows: ``row, valid [BR]``, sums ``[BR, BG, BD]``; backward also the gradient of the rows' own scores."""
    mask = valid[:, None, None] & in_tile[None, :, :]
    place = row[:, None, None] * S_OUT + at[None, :, :]
    mask_g = valid[:, None] & in_group[None, :]
    if SCALED:
        scale = tl.load(inverse + row[:, None] * H + head[None, :], mask=mask_g, other=0.0)[:, :, None]
        acc *= scale
        if PLUS:
            plus *= scale
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)
    if BACKWARD:
        mine = tl.load(own + row[:, None, None] * S_OWN + at[None, :, :], mask=mask, other=0.0).to(ACC)
        gain = tl.sum(mine * (slope * acc + (1.0 - slope) * plus), 2)
        if PER_HEAD == 1:
            gain -= tl.load(loss + row[:, None] * H + head[None, :], mask=mask_g, other=0.0)
            tl.store(grad_a + row[:, None] * S_A + head[None, :], gain.to(grad_a.dtype.element_ty), mask=mask_g)
        else:
            tl.store(grad_a + row[:, None] * G + group[None, :], gain, mask=mask_g)
    elif PLUS:
        tl.store(out_plus + place, plus.to(out_plus.dtype.element_ty), mask=mask)


@triton.jit
def _gather_kernel(
    value, coefficient, own, loss, inverse, indices,
    heavy_start, heavy_len, heavy_row, light_start, light_len, light_row,
    out, out_plus, grad_a, part, num_heavy, num_light, num_partial, M, N, E, slope,
    H: tl.constexpr, D: tl.constexpr, G: tl.constexpr, PER_HEAD: tl.constexpr, SHARED: tl.constexpr,
    S_V: tl.constexpr, S_OWN: tl.constexpr, S_OUT: tl.constexpr, S_A: tl.constexpr, BACKWARD: tl.constexpr,
    PLUS: tl.constexpr, SCALED: tl.constexpr, ACC: tl.constexpr, BR: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """M rows of ``value`` are gathered into N rows; heavy items first, then light rows, BR at a time."""
    STEP: tl.constexpr = BD if PER_HEAD > 1 else D  # features from one group to the next
    piece = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    group = tl.program_id(1) * BG + tl.arange(0, BG)
    head = group // PER_HEAD
    d = tl.arange(0, BD)
    in_group = group < G
    in_tile = in_group[:, None] & (d < STEP)[None, :]
    at = group[:, None] * STEP + d[None, :]
    # A gradient that all heads share is a row of one head: the same places for every head.
    at_value = (group % PER_HEAD)[:, None] * STEP + d[None, :] if SHARED else at
    value += task * M * S_V
    coefficient += task * E * H
    out += task * N * S_OUT
    if SCALED:
        inverse += task * N * H
    if BACKWARD:
        own += task * N * S_OWN
        loss += task * N * H
        grad_a += task * N * (S_A if PER_HEAD == 1 else G)
    elif PLUS:
        out_plus += task * N * S_OUT
    acc = tl.zeros([BR, BG, BD], ACC)
    plus = tl.zeros([BR, BG, BD], ACC)
    lane = tl.arange(0, BR)
    if piece < num_heavy:
        start_one, length_one = heavy_piece(piece, heavy_start, heavy_len)
        for first_edge in range(0, length_one, BR * UNROLL):
            for one_more in tl.static_range(UNROLL):
                place = first_edge + one_more * BR + lane
                acc, plus = _meet(
                    value, coefficient, indices, start_one + place, place < length_one, head, at_value, in_tile,
                    in_group, acc, plus, H, S_V, PLUS, ACC,
                )  # fmt: skip
        acc_one = tl.sum(acc, 0)
        plus_one = tl.sum(plus, 0)
        if piece < num_partial:
            slot = (task * num_partial + piece) * (H * D) + at
            tl.store(part + slot, acc_one, mask=in_tile)
            if PLUS:
                size = tl.num_programs(2).to(tl.int64) * num_partial * (H * D)
                tl.store(part + size + slot, plus_one, mask=in_tile)
        else:
            one = tl.zeros([1], tl.int64)
            row_one = one + tl.load(heavy_row + piece).to(tl.int64)
            _finish(
                own, loss, inverse, out, out_plus, grad_a, row_one, one == 0, group, head, at, in_tile, in_group,
                acc_one[None, :, :], plus_one[None, :, :], slope,
                G, PER_HEAD, S_OWN, S_OUT, S_A, H, BACKWARD, PLUS, SCALED, ACC,
            )  # fmt: skip
    else:
        item = (piece - num_heavy) * BR + lane
        start, length, row, valid = light_rows(item, light_start, light_len, light_row, num_light)
        for first_step in range(0, tl.max(length, 0), UNROLL):
            for more in tl.static_range(UNROLL):
                step = first_step + more
                acc, plus = _meet(
                    value, coefficient, indices, start + step, step < length, head, at_value, in_tile, in_group,
                    acc, plus, H, S_V, PLUS, ACC,
                )  # fmt: skip
        _finish(
            own, loss, inverse, out, out_plus, grad_a, row, valid, group, head, at, in_tile, in_group, acc, plus,
            slope, G, PER_HEAD, S_OWN, S_OUT, S_A, H, BACKWARD, PLUS, SCALED, ACC,
        )  # fmt: skip


@triton.jit
def _finish_hubs_kernel(
    part, hub_ptr, hub_row, own, loss, inverse, out, out_plus, grad_a, num_partial, N, slope,
    H: tl.constexpr, D: tl.constexpr, G: tl.constexpr, PER_HEAD: tl.constexpr,
    S_OWN: tl.constexpr, S_OUT: tl.constexpr, S_A: tl.constexpr, BACKWARD: tl.constexpr,
    PLUS: tl.constexpr, SCALED: tl.constexpr, ACC: tl.constexpr, BP: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add the parts of one hub, BP at a time and always in the same order, and finish its row."""
    STEP: tl.constexpr = BD if PER_HEAD > 1 else D
    hub = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    group = tl.program_id(1) * BG + tl.arange(0, BG)
    head = group // PER_HEAD
    d = tl.arange(0, BD)
    in_group = group < G
    in_tile = in_group[:, None] & (d < STEP)[None, :]
    at = group[:, None] * STEP + d[None, :]
    out += task * N * S_OUT
    if SCALED:
        inverse += task * N * H
    if BACKWARD:
        own += task * N * S_OWN
        loss += task * N * H
        grad_a += task * N * (S_A if PER_HEAD == 1 else G)
    elif PLUS:
        out_plus += task * N * S_OUT
    size = tl.num_programs(2).to(tl.int64) * num_partial * (H * D)
    acc = tl.zeros([BP, BG, BD], ACC)
    plus = tl.zeros([BP, BG, BD], ACC)
    last = tl.load(hub_ptr + hub + 1)
    for first in range(tl.load(hub_ptr + hub), last, BP):
        slot = first + tl.arange(0, BP)
        mask = (slot < last)[:, None, None] & in_tile[None, :, :]
        place = (task * num_partial + slot)[:, None, None] * (H * D) + at[None, :, :]
        acc += tl.load(part + place, mask=mask, other=0.0)
        if PLUS:
            plus += tl.load(part + size + place, mask=mask, other=0.0)
    one = tl.zeros([1], tl.int64)
    _finish(
        own, loss, inverse, out, out_plus, grad_a, one + tl.load(hub_row + hub).to(tl.int64), one == 0, group, head, at,
        in_tile, in_group, tl.sum(acc, 0)[None, :, :], tl.sum(plus, 0)[None, :, :], slope,
        G, PER_HEAD, S_OWN, S_OUT, S_A, H, BACKWARD, PLUS, SCALED, ACC,
    )  # fmt: skip


@triton.jit
def _join_groups_kernel(
    gains, loss, grad_a, items, H: tl.constexpr, PER_HEAD: tl.constexpr, S_A: tl.constexpr, BN: tl.constexpr,
    BG: tl.constexpr,
):  # fmt: skip
    """``d a_src``: the gains of a head's groups added up, less the loss."""
    item = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)  # a row and a head
    g = tl.arange(0, BG)
    valid = item < items
    gain = tl.load(
        gains + item[:, None] * PER_HEAD + g[None, :], mask=valid[:, None] & (g < PER_HEAD)[None, :], other=0.0
    )
    result = tl.sum(gain, 1) - tl.load(loss + item, mask=valid, other=0.0)
    tl.store(grad_a + (item // H) * S_A + item % H, result.to(grad_a.dtype.element_ty), mask=valid)


@dataclass(frozen=True)
class RowsLaunch:
    """Launch parameters: rows and groups per tile, features per group, unrolling, warps."""

    block_rows: int
    block_groups: int
    group_width: int
    unroll: int = 4
    num_warps: int = 4


def group_width(width: int) -> int:
    """Features of a group: the largest power of two that divides a head, or the head itself padded to one."""
    divisor = width & -width
    return min(divisor, 64) if divisor >= 4 else next_power_of_2(width)


def choose_rows_launch(heads: int, width: int, shared: bool = False, itemsize: int = 4) -> RowsLaunch:
    """Few rows and many edges in flight.

    Rows times groups stay below the number of threads: only then does Triton load the coefficients where they are
    needed instead of passing them through shared memory in every step. Measured on an H200 (arxiv shape): 4 heads of
    16, 0.139 ms forward and 0.134 backward, against 0.155 and 0.156 with half as many edges in flight; 4 heads of 40,
    0.364 forward in tiles of 32 features, and 0.312 backward from a shared gradient with all heads in one tile. In half
    precision half as many warps, so that a thread still loads 16 bytes: 0.075 against 0.092 and 0.085 against 0.109 for
    4 heads of 16 (8 tasks, per task); 0.249 against 0.296 and 0.239 against 0.249 for 4 heads of 40.
    """
    half = itemsize == 2
    if shared:
        unit = next_power_of_2(width)
        groups = min(next_power_of_2(heads), max(1, 256 // unit))
        return RowsLaunch(2, groups, unit, 4, max(1, min(8, groups * unit // (256 if half else 128))))
    unit = group_width(width)
    groups = heads * max(1, width // unit)
    wide, narrow = max(1, 64 // unit), max(1, 32 // unit)
    if half:
        return RowsLaunch(4, min(wide, next_power_of_2(groups)), unit, 8, 1)
    if groups % wide and groups % narrow == 0:
        return RowsLaunch(4, narrow, unit, 8, 1)
    return RowsLaunch(4, min(wide, next_power_of_2(groups)), unit, 8, 2)


def gather_rows(
    value: Tensor, spacing: int, shared: bool, coefficient: Tensor, heads: int, width: int, csr: PackedCSR, plus: bool,
    out: Tensor, out_spacing: int, out_plus: Tensor | None = None, *, inverse: Tensor | None = None,
    own: Tensor | None = None, own_spacing: int = 0, loss: Tensor | None = None, grad_a: Tensor | None = None,
    grad_a_spacing: int = 0, slope: float = 0.0, launch: RowsLaunch | None = None,
) -> None:  # fmt: skip
    """Fill ``out`` (and ``out_plus``, or backward ``grad_a``) from rows of ``value`` along the edges of ``csr``.

    ``value [T, M, ...]`` has its rows ``spacing`` elements apart (one head per row if ``shared``), ``coefficient`` is
    ``[T, E, H]``, ``out [T, N, H, D]`` has rows ``out_spacing`` apart. A row's sums are multiplied by its ``inverse
    [T, N, H]`` if given. With ``own [T, N, H, D]`` it is the backward pass.
    """
    work, acc, sums = csr.work, triton_acc(coefficient.dtype), accumulate_dtype(coefficient.dtype)
    tasks, E = coefficient.shape[:2]
    N = csr.num_rows
    M = value.numel() // max(1, tasks * (width if shared else heads * width))
    launch = launch or choose_rows_launch(heads, width, shared, value.element_size())
    unit = launch.group_width
    per_head = width // unit if width % unit == 0 else 1
    groups = heads * per_head
    backward = own is not None
    gains = grad_a
    if backward and per_head > 1:
        gains = coefficient.new_empty(tasks, N, groups, dtype=sums)
    partials = work.hub_of_partial.numel()
    part = coefficient.new_empty(2 if plus else 1, tasks, max(partials, 1), heads * width, dtype=sums)
    own_or = own if backward else coefficient
    loss_or, gains_or = (loss, gains) if backward else (coefficient, coefficient)
    plus_or = coefficient if out_plus is None else out_plus
    inverse_or = coefficient if inverse is None else inverse
    tiles = -(-groups // launch.block_groups)
    constants = {
        "H": heads, "D": width, "G": groups, "PER_HEAD": per_head, "S_OWN": own_spacing, "S_OUT": out_spacing,
        "S_A": grad_a_spacing, "BACKWARD": backward, "PLUS": plus, "SCALED": inverse is not None, "ACC": acc,
        "BG": launch.block_groups, "BD": unit,
    }  # fmt: skip
    num_heavy, num_light = work.heavy_row.numel(), work.light_row.numel()
    _gather_kernel[(num_heavy + -(-num_light // launch.block_rows), tiles, tasks)](
        value, coefficient, own_or, loss_or, inverse_or, csr.indices, work.heavy_start, work.heavy_len, work.heavy_row,
        work.light_start, work.light_len, work.light_row, out, plus_or, gains_or, part,
        num_heavy, num_light, partials, M, N, E, slope, SHARED=shared, S_V=spacing,
        BR=launch.block_rows, UNROLL=launch.unroll, num_warps=launch.num_warps, **constants,
    )  # fmt: skip
    if partials:
        _finish_hubs_kernel[(work.hub_row.numel(), tiles, tasks)](
            part, work.hub_ptr, work.hub_row, own_or, loss_or, inverse_or, out, plus_or, gains_or, partials, N, slope,
            BP=8, num_warps=4, **constants,
        )  # fmt: skip
    if backward and per_head > 1:
        block = 256
        _join_groups_kernel[(-(-tasks * N * heads // block),)](
            gains, loss, grad_a, tasks * N * heads, H=heads, PER_HEAD=per_head, S_A=grad_a_spacing, BN=block,
            BG=next_power_of_2(per_head), num_warps=4,
        )  # fmt: skip


# An epoch of a GAT on the arxiv shape in float32 takes 2.65 ms on an H200 with each layer in the way chosen below, 2.79
# with all in one pass and 2.84 with all in two.
WIDEST = 32  # features of a head that fills its lanes


def suits_one_pass(dtype: torch.dtype, width: int, coefficients: int, limits: DeviceLimits = H200) -> bool:
    """Whether one pass is faster than two for heads of ``width`` features and so many ``coefficients`` per task."""
    full = width <= WIDEST and width == next_power_of_2(width)
    return dtype.itemsize >= 4 and (full or coefficients * dtype.itemsize > limits.l2_for_coefficients)


def forward_in_two_passes(
    x: Tensor, a_src: Tensor, a_dst: Tensor, slope: float, rate: Tensor | None, clock: Tensor | None, site: int,
    csr: PackedCSR, training: bool, results: tuple[Tensor, Tensor, Tensor, Tensor], limit: float | None = None,
) -> None:  # fmt: skip
    """Fill ``results``: out, out_plus (if ``training``), alpha_plus and log_sum.

    The coefficients ``[T, E, H]`` lack the softmax's denominator: the second pass multiplies a row's sums by its
    ``inverse [T, N, H]``. If source scores spread by more than ``limit``, a row finds its maximum first; by default, from
    where coefficients of their type would lose precision.
    """
    out, out_plus, alpha_plus, log_sum = results
    work, acc, partials = csr.work, triton_acc(log_sum.dtype), csr.work.hub_of_partial.numel()
    M, H, D = x.shape[-3:]
    tasks, N = a_src.shape[:-2].numel(), csr.num_rows
    (x, s_x), (a_src, s_src), (a_dst, s_dst) = spaced_rows(x, 2), spaced_rows(a_src, 1), spaced_rows(a_dst, 1)
    bounds = score_bounds(a_src, s_src, log_sum)
    weights, inverse = a_src.new_empty(tasks, csr.num_edges, H), log_sum.new_empty(tasks, N, H)
    part = log_sum.new_empty(3, tasks, max(partials, 1), H)
    tile = _coefficient_tile(H, 8, 2)
    if limit is None:
        limit = min(spread_limit(weights.dtype, slope), STORED_LIMIT.get(weights.dtype, inf))
    _coefficients_kernel[_grid(csr, H, tile, tasks)](
        a_src, a_dst, bounds, log_sum if rate is None else rate.contiguous(),
        log_sum if clock is None else clock.contiguous(), csr.indices, *work_items(csr), work.hub_ptr,
        weights, log_sum, alpha_plus, inverse, part,
        work.heavy_row.numel(), work.light_row.numel(), partials, M, N, csr.num_edges, slope, limit, site,
        per_task_stride(rate, tasks, 1), per_task_stride(clock, tasks, 2),
        H=H, S_SRC=s_src, S_DST=s_dst, DROP=rate is not None, ACC=acc, **tile,
    )  # fmt: skip
    if partials:
        _add_chunks_kernel[(work.hub_row.numel(), -(-H // tile["BH"]), tasks)](
            part, work.hub_ptr, work.hub_row, log_sum, alpha_plus, inverse, partials, N,
            H=H, ACC=acc, L=16, BH=tile["BH"], num_warps=1,
        )  # fmt: skip
    gather_rows(x, s_x, False, weights, H, D, csr, training, out, H * D, out_plus, inverse=inverse)


def backward_in_two_passes(
    grad: Tensor, shared: bool, x: Tensor, a_src: Tensor, stats: Tensor, slope: float, rate: Tensor | None,
    clock: Tensor | None, site: int, back: PackedCSR, grad_x: Tensor, grad_a: Tensor,
) -> None:  # fmt: skip
    """Fill ``grad_x [..., M, H, D]`` and ``grad_a [..., M, H]``; ``grad`` is one row for all heads if ``shared``.

    The first pass leaves ``loss[j] = sum over the out-edges of j of alpha * slope(e) * delta`` next to the coefficients.
    """
    work, partials = back.work, back.work.hub_of_partial.numel()
    M, H, D = x.shape[-3:]
    N, tasks, stats = stats.shape[-3], a_src.shape[:-2].numel(), flatten_tasks(stats, 3)
    (x, s_x), (_, g_x), (_, g_src) = spaced_rows(x, 2), spaced_rows(grad_x, 2), spaced_rows(grad_a, 1)
    a_src, s_src = spaced_rows(a_src, 1)
    weights, loss = a_src.new_empty(tasks, back.num_edges, H), stats.new_empty(tasks, M, H)
    part = stats.new_empty(tasks, max(partials, 1), H)
    tile = _coefficient_tile(H, 4, 1)
    _coefficients_back_kernel[_grid(back, H, tile, tasks)](
        stats, a_src, stats if rate is None else rate.contiguous(), stats if clock is None else clock.contiguous(),
        back.indices, back.perm, *work_items(back), weights, loss, part,
        work.heavy_row.numel(), work.light_row.numel(), partials, M, N, back.num_edges,
        slope, site, per_task_stride(rate, tasks, 1), per_task_stride(clock, tasks, 2),
        H=H, S_SRC=s_src, DROP=rate is not None, ACC=triton_acc(stats.dtype), **tile,
    )  # fmt: skip
    if partials:
        add_hub_parts(part, work, loss, M)
    gather_rows(
        grad, D if shared else H * D, shared, weights, H, D, back, True, grad_x, g_x, own=x, own_spacing=s_x,
        loss=loss, grad_a=grad_a, grad_a_spacing=g_src, slope=slope,
    )  # fmt: skip
