"""Triton kernels of ``gat.py``, backward: per-row statistics, then one pass over the transpose.

Rows are sources there, and gradients the rows that are gathered (``gat_gather_triton.py``). With ``mix = slope * acc +
(1 - slope) * plus`` and the row's own ``x``

    d x[j, h]     = acc[j, h]
    d a_src[j, h] = <x[j, h], mix[j, h]> - sum over the out-edges of j of alpha * slope(e) * delta

so that no product of two rows is taken on an edge.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    weigh_four,
    wide_offsets,
    work_items,
)
from weft.ops.attention.gat_two_pass_triton import backward_in_two_passes, suits_one_pass
from weft.ops.csr.packed import PackedCSR
from weft.ops.launch.backend import next_power_of_2
from weft.ops.launch.device_limits import limits_of
from weft.ops.launch.launch import flatten_tasks, per_task_stride, triton_acc
from weft.ops.launch.triton_lang import tl, triton
from weft.ops.random.triton_bits import keep_scale, mask_row, mix_key
from weft.ops.sparse.lanes_triton import spaced_rows


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


@dataclass(frozen=True)
class RowGradientLaunch:
    """Launch parameters: items (a row and a head) per tile, features per step, warps."""

    items: int
    block_width: int
    num_warps: int = 4


def choose_row_gradient_launch(width: int) -> RowGradientLaunch:
    """All features of a head at a time, a thousand elements per tile.

    A head of 40 features is padded to 64; five steps of 8 would leave no lane idle, but the loads of neighbouring lanes
    would no longer be coalesced. Not measured.
    """
    block_width = next_power_of_2(width)
    return RowGradientLaunch(max(1, 1024 // block_width), block_width)


def one_head(grad: Tensor) -> tuple[Tensor, bool]:
    """``(grad [..., N, D], True)`` if all heads share one row, as they do after a sum over heads.

    Otherwise ``(contiguous grad [..., N, H, D], False)``.
    """
    if grad.shape[-2] > 1 and grad.stride(-2) == 0 and grad.select(-2, 0).is_contiguous():
        return grad.select(-2, 0), True
    return grad.contiguous(), False


def attention_row_gradient_triton(
    grad: Tensor, out: Tensor, out_plus: Tensor, alpha_plus: Tensor, a_dst: Tensor, log_sum: Tensor, slope: float,
    into: Tensor | None = None, launch: RowGradientLaunch | None = None,
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
        launch = launch or choose_row_gradient_launch(D)
        _row_gradient_kernel[(-(-rows * H // launch.items),)](
            grad, out, out_plus, alpha_plus, a_dst, log_sum, stats, grad_a_dst, rows * H, slope,
            H=H, D=D, S_DST=s_dst, G_DST=g_dst, SHARED=shared, ACC=triton_acc(grad.dtype),
            BN=launch.items, BD=launch.block_width, num_warps=launch.num_warps,
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
    key = tl.zeros([], tl.uint64)
    fraction = tl.zeros([], tl.float32)
    if DROP:
        key = mix_key(clock + task * stride_clock, site)
        fraction = tl.load(rate + task * stride_rate).to(tl.float32)
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
