"""Kernels for merged launches: ``edge_softmax`` and its gradient in whole rows, and rows pushed along their edges.

A row that is no hub is finished by one program: its edges are read once for the maximum and the sum, and once more,
from the cache, to be normalised. Chunks of hubs write their maximum and sum, and a second launch normalises them by
the totals of their row. Tiles are ``[rows, edges, heads]``; a heavy row has a tile of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.csr.packed import PackedCSR
from weft.ops.launch.backend import accumulate_dtype, limits_of, next_power_of_2
from weft.ops.launch.triton_lang import flatten_tasks, tl, triton, triton_acc
from weft.ops.sparse.spmm import choose_launch

LIGHT_ROWS, LIGHT_EDGES, HEAVY_EDGES = 32, 4, 256


@triton.jit
def _gather_stats(
    scores, other, first, count, h, heads,
    DOT: tl.constexpr, ACC: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Of BR rows that start at ``first [BR]``: maximum and sum of exponentials, or (DOT) 0 and the sum of products."""
    lane = tl.arange(0, BE)
    best = tl.full([BR, BE, BH], float("-inf"), ACC)
    added = tl.zeros([BR, BE, BH], ACC)
    for base in range(0, tl.max(count, 0), BE):
        inside = ((base + lane)[None, :] < count[:, None])[:, :, None] & (h < heads)[None, None, :]
        at = (first[:, None] + (base + lane)[None, :])[:, :, None] * heads + h[None, None, :]
        value = tl.load(scores + at, mask=inside, other=0.0).to(ACC)
        if DOT:
            added += value * tl.load(other + at, mask=inside, other=0.0).to(ACC)
        else:
            value = tl.where(inside, value, float("-inf"))
            higher = tl.maximum(best, value)
            # Lanes that have seen nothing yet hold -inf, and -inf - -inf is NaN: shift those by 0.
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            added = added * tl.exp(best - shift) + tl.exp(value - shift)
            best = higher
    if DOT:
        return tl.zeros([BR, BH], ACC), tl.sum(added, 1)
    top = tl.max(best, 1)
    shift_top = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.sum(added * tl.exp(best - shift_top[:, None, :]), 1)


@triton.jit
def _normalise(
    scores, other, out, first, count, h, heads, top, total,
    DOT: tl.constexpr, ACC: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Of the same rows: ``exp(s - max) / sum``, or (DOT) ``out * (grad - sum of products)``."""
    lane = tl.arange(0, BE)
    for base in range(0, tl.max(count, 0), BE):
        inside = ((base + lane)[None, :] < count[:, None])[:, :, None] & (h < heads)[None, None, :]
        at = (first[:, None] + (base + lane)[None, :])[:, :, None] * heads + h[None, None, :]
        value = tl.load(scores + at, mask=inside, other=0.0).to(ACC)
        if DOT:
            result = value * (tl.load(other + at, mask=inside, other=0.0).to(ACC) - total[:, None, :])
        else:
            result = tl.exp(value - top[:, None, :]) / total[:, None, :]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _softmax_kernel(
    scores, other, heavy_start, heavy_len, light_start, light_len, out, part_top, part_sum,
    num_heavy, num_light, num_partial, E, heads,
    DOT: tl.constexpr, ACC: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr, BL: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """One heavy row, one chunk of a hub, or BR light rows; all heads of one task."""
    piece = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    h = tl.arange(0, BH)
    scores += task * E * heads
    other += task * E * heads
    out += task * E * heads
    if piece < num_heavy:
        one = tl.zeros([1], tl.int64)
        first_one = one + tl.load(heavy_start + piece).to(tl.int64)
        count_one = (one + tl.load(heavy_len + piece)).to(tl.int32)
        top_one, sum_one = _gather_stats(scores, other, first_one, count_one, h, heads, DOT, ACC, 1, BE, BH)
        if piece < num_partial:
            at = (task * num_partial + piece) * heads + (one[:, None] + h[None, :])
            tl.store(part_top + at, top_one, mask=(h < heads)[None, :])
            tl.store(part_sum + at, sum_one, mask=(h < heads)[None, :])
        else:
            _normalise(scores, other, out, first_one, count_one, h, heads, top_one, sum_one, DOT, ACC, 1, BE, BH)
    else:
        item = (piece - num_heavy) * BR + tl.arange(0, BR)
        valid = item < num_light
        first = tl.load(light_start + item, mask=valid, other=0).to(tl.int64)
        count = tl.load(light_len + item, mask=valid, other=0)
        top, total = _gather_stats(scores, other, first, count, h, heads, DOT, ACC, BR, BL, BH)
        _normalise(scores, other, out, first, count, h, heads, top, total, DOT, ACC, BR, BL, BH)


@triton.jit
def _hub_softmax_kernel(
    scores, other, heavy_start, heavy_len, hub_ptr, hub_of_partial, out, part_top, part_sum,
    num_partial, E, heads,
    DOT: tl.constexpr, ACC: tl.constexpr, BE: tl.constexpr, BH: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Normalise one chunk of a hub by the maximum and the sum of all its hub's chunks, always in the same order."""
    piece = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    h = tl.arange(0, BH)
    hub = tl.load(hub_of_partial + piece)
    last = tl.load(hub_ptr + hub + 1)
    best = tl.full([BP, BH], float("-inf"), ACC)
    added = tl.zeros([BP, BH], ACC)
    for base in range(tl.load(hub_ptr + hub), last, BP):
        slot = base + tl.arange(0, BP)
        mask = (slot < last)[:, None] & (h < heads)[None, :]
        at = (task * num_partial + slot)[:, None] * heads + h[None, :]
        value = tl.load(part_sum + at, mask=mask, other=0.0)
        if DOT:
            added += value
        else:
            top = tl.load(part_top + at, mask=mask, other=float("-inf"))
            higher = tl.maximum(best, top)
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            added = added * tl.exp(best - shift) + value * tl.exp(top - shift)
            best = higher
    hub_top = tl.max(best, 0)
    total = tl.sum(added, 0)
    if not DOT:
        shift_top = tl.where(hub_top == float("-inf"), 0.0, hub_top)
        total = tl.sum(added * tl.exp(best - shift_top[None, :]), 0)
    one = tl.zeros([1], tl.int64)
    first = one + tl.load(heavy_start + piece).to(tl.int64)
    count = (one + tl.load(heavy_len + piece)).to(tl.int32)
    start = task * E * heads
    _normalise(
        scores + start, other + start, out + start, first, count, h, heads, hub_top[None, :], total[None, :],
        DOT, ACC, 1, BE, BH,
    )  # fmt: skip


def row_softmax_triton(scores: Tensor, other: Tensor | None, csr: PackedCSR) -> Tensor:
    """The softmax of ``scores [..., E, H]`` over the edges of a row, as ``edge_softmax_triton`` gives it.

    If ``other`` is the gradient of a softmax, and ``scores`` its result: the gradient of the scores.
    """
    work = csr.work
    scores_TEH = flatten_tasks(scores, 2)
    other_TEH = scores_TEH if other is None else flatten_tasks(other, 2)
    tasks, E, heads = scores_TEH.shape
    out = torch.empty_like(scores_TEH)
    if out.numel() == 0:
        return out.reshape(scores.shape)
    num_heavy, num_light, partials = work.heavy_row.numel(), work.light_row.numel(), work.hub_of_partial.numel()
    part_top = scores.new_empty(tasks, max(partials, 1), heads, dtype=accumulate_dtype(scores.dtype))
    part_sum = torch.empty_like(part_top)
    fixed = {"DOT": other is not None, "ACC": triton_acc(scores.dtype), "BE": HEAVY_EDGES, "BH": next_power_of_2(heads)}
    _softmax_kernel[(num_heavy + -(-num_light // LIGHT_ROWS), 1, tasks)](
        scores_TEH, other_TEH, work.heavy_start, work.heavy_len, work.light_start, work.light_len,
        out, part_top, part_sum, num_heavy, num_light, partials, E, heads,
        BR=LIGHT_ROWS, BL=LIGHT_EDGES, num_warps=4, **fixed,
    )  # fmt: skip
    if partials:
        _hub_softmax_kernel[(partials, 1, tasks)](
            scores_TEH, other_TEH, work.heavy_start, work.heavy_len, work.hub_ptr, work.hub_of_partial,
            out, part_top, part_sum, partials, E, heads, BP=16, num_warps=4, **fixed,
        )  # fmt: skip
    return out.reshape(scores.shape)


# ---- Pushes: see launchers.py


@triton.jit
def _push_edges(
    indices, w, col_scale, out, value, edge, inside, f, in_f,
    F: tl.constexpr, HAS_W: tl.constexpr, HAS_CS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add ``value [L or 1, BF]`` to the rows of ``out`` at the sources of a vector of edges, atomically."""
    col = tl.load(indices + edge, mask=inside, other=0).to(tl.int64)
    factor = inside.to(ACC)
    if HAS_W:
        factor *= tl.load(w + edge, mask=inside, other=0.0).to(ACC)
    if HAS_CS:
        factor *= tl.load(col_scale + col, mask=inside, other=0.0).to(ACC)
    mask = inside[:, None] & in_f[None, :]
    tl.atomic_add(out + col[:, None] * F + f[None, :], value * factor[:, None], mask=mask, sem="relaxed")


@triton.jit
def _push_kernel(
    x, w, row_scale, col_scale, indices,
    heavy_start, heavy_len, heavy_row, light_start, light_len, light_row, hub_row, hub_of_partial,
    out, num_heavy, num_light, num_partial, M, N, stride_w,
    F: tl.constexpr, HAS_W: tl.constexpr, HAS_RS: tl.constexpr, HAS_CS: tl.constexpr, ACC: tl.constexpr,
    BR: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """One work item: its rows (of N) are pushed along their edges to the columns (of M)."""
    piece = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    in_f = f < F
    x += task * N * F
    w += task * stride_w
    out += task * M * F
    if piece < num_heavy:
        start_one = tl.load(heavy_start + piece).to(tl.int64)
        length_one = tl.load(heavy_len + piece)
        row_one = tl.load(heavy_row + piece).to(tl.int64)
        if piece < num_partial:
            row_one = tl.load(hub_row + tl.load(hub_of_partial + piece)).to(tl.int64)
        value_one = tl.load(x + row_one * F + f, mask=in_f, other=0.0).to(ACC)
        if HAS_RS:
            value_one *= tl.load(row_scale + row_one).to(ACC)
        lane = tl.arange(0, BE)
        for first in range(0, length_one, BE):
            _push_edges(
                indices, w, col_scale, out, value_one[None, :], start_one + first + lane, first + lane < length_one,
                f, in_f, F, HAS_W, HAS_CS, ACC,
            )  # fmt: skip
    else:
        item = (piece - num_heavy) * BR + tl.arange(0, BR)
        valid = item < num_light
        start = tl.load(light_start + item, mask=valid, other=0).to(tl.int64)
        length = tl.load(light_len + item, mask=valid, other=0)
        row = tl.load(light_row + item, mask=valid, other=0).to(tl.int64)
        at = row[:, None] * F + f[None, :]
        value = tl.load(x + at, mask=valid[:, None] & in_f[None, :], other=0.0).to(ACC)
        if HAS_RS:
            value *= tl.load(row_scale + row, mask=valid, other=0.0).to(ACC)[:, None]
        for step in range(tl.max(length, 0)):
            _push_edges(
                indices, w, col_scale, out, value, start + step, step < length, f, in_f, F, HAS_W, HAS_CS, ACC
            )  # fmt: skip


def push_triton(
    x: Tensor, weight: Tensor | None, row_scale: Tensor | None, col_scale: Tensor | None, csr: PackedCSR, num_cols: int
) -> Tensor:  # fmt: skip
    """``[..., M, F]``: the transpose's product with ``x [..., N, F]``, in the accumulation type."""
    work, lead = csr.work, x.shape[:-2]
    x_TNF = flatten_tasks(x, 2)
    tasks, N, F = x_TNF.shape
    out = x.new_zeros(tasks, num_cols, F, dtype=accumulate_dtype(x.dtype))
    if out.numel() and N:
        launch = choose_launch(num_cols, F, x.element_size(), csr.num_edges / N, limits_of(x.device))
        per_task = weight is not None and weight.dim() > 1
        if weight is not None:
            weight = (weight.expand(*lead, csr.num_edges) if per_task else weight).contiguous()
        num_heavy, num_light = work.heavy_row.numel(), work.light_row.numel()
        _push_kernel[(num_heavy + -(-num_light // launch.block_rows), -(-F // launch.block_features), tasks)](
            x_TNF, *(x_TNF if value is None else value for value in (weight, row_scale, col_scale)), csr.indices,
            work.heavy_start, work.heavy_len, work.heavy_row, work.light_start, work.light_len, work.light_row,
            work.hub_row, work.hub_of_partial, out, num_heavy, num_light, work.hub_of_partial.numel(), num_cols, N,
            csr.num_edges if per_task else 0,
            F=F, HAS_W=weight is not None, HAS_RS=row_scale is not None, HAS_CS=col_scale is not None,
            ACC=triton_acc(x.dtype), BR=launch.block_rows, BE=launch.block_edges, BF=launch.block_features,
            num_warps=launch.num_warps,
        )  # fmt: skip
    return out.reshape(*lead, num_cols, F)
