"""Triton kernels of ``gat.py`` in two passes, second pass: rows gathered along the edges, times the coefficients.

    acc[i]  = sum over e of |c[e, h]|        * v[j, h, :]
    plus[i] = sum over e of max(c[e, h], 0)  * v[j, h, :]        edges with a positive argument only

Forward, these times ``inverse[i, h]`` (one over the softmax's denominator, which the coefficients lack) are the layer's
output and the part of it that ``d a_dst`` needs. Backward, over the transpose with gradients as rows, ``acc`` is ``d x``
and with the row's own ``x``

    d a_src[j, h] = <x[j, h], slope * acc + (1 - slope) * plus> - loss[j, h]

so no product of two rows is taken per edge. A row of H heads of D features is split into G *groups* of BD features,
PER_HEAD per head; a tile is ``[BR, BG, BD]``: rows (or edges of one heavy row), groups, features.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft.ops.csr.packed import PackedCSR
from weft.ops.csr.worklist_triton import heavy_piece, light_rows
from weft.ops.launch.backend import accumulate_dtype, next_power_of_2
from weft.ops.launch.launch import triton_acc
from weft.ops.launch.triton_lang import tl, triton


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
