"""Triton kernels of ``gat.py`` in two passes, first pass: the softmax's coefficients, one number per edge and head.

Scores, exponentials and the bits of dropout cost as much for a head of 16 features as for one of 1; inside the loop that
gathers rows every thread along the features would repeat them. Here a thread handles one edge and head. The result is
``[E, H]``, small compared with the rows: ``keep / (1 - rate) * alpha``, with the sign of the score's argument (the
leaky slope takes two values, and both directions need to know which). Coefficients have the type of the rows that they
weight: in half precision they are rounded as those are, and the sums are float32's.

Forward, ``alpha`` is only ``exp(score - shift)``: the pass that writes the coefficients adds up the denominator, and the
pass that weights rows with them divides a row's sums by it. The shift is a bound of the row's scores, computed before
(``gat_score_bounds_triton.py``); if source scores are too far apart for it, every row finds its maximum first.

Tiles are ``[L, U, BH]``: lanes, edges and heads. A lane is a light row that meets U of its edges at a time, so that what it
reads and writes of them lies side by side; in a heavy row all lanes take edges of the same row (see ``worklist.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from weft.ops.attention.gat_gather_triton import leaky, work_items
from weft.ops.attention.gat_score_bounds_triton import score_bounds, spread_limit
from weft.ops.csr.packed import PackedCSR
from weft.ops.csr.worklist_triton import heavy_owner, heavy_piece, heavy_row_span, light_rows
from weft.ops.launch.backend import next_power_of_2
from weft.ops.launch.launch import per_task_stride, triton_acc
from weft.ops.launch.triton_lang import tl, triton
from weft.ops.random.triton_bits import keep_scale, mask_row, mix_key
from weft.ops.sparse.lanes_triton import spaced_rows


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
    some = total != 0  # a NaN denominator stays NaN
    safe = tl.where(some, total, 1.0)
    tl.store(log_sum + at, tl.where(some, top + tl.log(safe), 0.0), mask=mask)
    tl.store(alpha_plus + at, plus / safe, mask=mask)
    tl.store(inverse + at, 1.0 / safe, mask=mask)


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
    key = tl.zeros([], tl.uint64)
    fraction = tl.zeros([], tl.float32)
    if DROP:
        key = mix_key(clock + task * stride_clock, site)
        fraction = tl.load(rate + task * stride_rate).to(tl.float32)
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
    key = tl.zeros([], tl.uint64)
    fraction = tl.zeros([], tl.float32)
    if DROP:
        key = mix_key(clock + task * stride_clock, site)
        fraction = tl.load(rate + task * stride_rate).to(tl.float32)
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


@dataclass(frozen=True)
class CoefficientLaunch:
    """Launch parameters: lanes, edges and heads per tile, warps."""

    lanes: int
    edges: int
    block_heads: int
    num_warps: int = 1

    @property
    def tile(self) -> dict[str, int]:
        """As a kernel's keywords."""
        return {"L": self.lanes, "U": self.edges, "BH": self.block_heads, "num_warps": self.num_warps}


def choose_coefficient_launch(heads: int, kind: str) -> CoefficientLaunch:
    """Few warps, one thread per edge with four heads.

    Measured on an H200 (arxiv shape, 4 heads): forward 0.052 ms (with given denominators), backward 0.069.
    """
    lanes, edges, warps = {"forward": (8, 8, 2), "backward": (4, 8, 1)}[kind]
    return CoefficientLaunch(lanes, edges, min(8, next_power_of_2(heads)), warps)


STORED_LIMIT = {torch.float16: 4.0}  # exp(-4) is a float16 with full precision


def _grid(csr: PackedCSR, heads: int, tile: dict[str, int], tasks: int) -> tuple[int, int, int]:
    heavy, light = csr.work.heavy_row.numel(), csr.work.light_row.numel()
    return heavy + -(-light // tile["L"]), -(-heads // tile["BH"]), tasks


def _limit(dtype: torch.dtype, slope: float) -> float:
    """The largest spread of source scores for which coefficients of ``dtype`` keep full precision."""
    return min(spread_limit(dtype, slope), STORED_LIMIT.get(dtype, inf))


def softmax_coefficients(
    a_src: Tensor, a_dst: Tensor, slope: float, rate: Tensor | None, clock: Tensor | None, site: int, csr: PackedCSR,
    log_sum: Tensor, alpha_plus: Tensor, limit: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(signed coefficients [T, E, H] in the order of the edges, inverse [T, N, H])``.

    The coefficients lack the softmax's denominator: a row's sums are to be multiplied by its ``inverse``. Fills
    ``log_sum`` and ``alpha_plus [..., N, H]`` on the way: the log-denominator, and the share of it that edges with a
    positive argument have. If source scores spread by more than ``limit``, a row finds its maximum first.
    """
    work, acc = csr.work, triton_acc(log_sum.dtype)
    M, H = a_src.shape[-2:]
    tasks, N = a_src.shape[:-2].numel(), csr.num_rows
    (a_src, s_src), (a_dst, s_dst) = spaced_rows(a_src, 1), spaced_rows(a_dst, 1)
    bounds = score_bounds(a_src, s_src, log_sum)
    out, inverse = a_src.new_empty(tasks, csr.num_edges, H), log_sum.new_empty(tasks, N, H)
    partials = work.hub_of_partial.numel()
    part = log_sum.new_empty(3, tasks, max(partials, 1), H)
    tile = choose_coefficient_launch(H, "forward").tile
    _coefficients_kernel[_grid(csr, H, tile, tasks)](
        a_src, a_dst, bounds, log_sum if rate is None else rate.contiguous(),
        log_sum if clock is None else clock.contiguous(), csr.indices, *work_items(csr), work.hub_ptr,
        out, log_sum, alpha_plus, inverse, part,
        work.heavy_row.numel(), work.light_row.numel(), partials, M, N, csr.num_edges,
        slope, _limit(out.dtype, slope) if limit is None else limit, site,
        per_task_stride(rate, tasks, 1), per_task_stride(clock, tasks, 2),
        H=H, S_SRC=s_src, S_DST=s_dst, DROP=rate is not None, ACC=acc, **tile,
    )  # fmt: skip
    if partials:
        _add_chunks_kernel[(work.hub_row.numel(), -(-H // tile["BH"]), tasks)](
            part, work.hub_ptr, work.hub_row, log_sum, alpha_plus, inverse, partials, N,
            H=H, ACC=acc, L=16, BH=tile["BH"], num_warps=1,
        )  # fmt: skip
    return out, inverse


def coefficients_back(
    stats: Tensor, a_src: Tensor, slope: float, rate: Tensor | None, clock: Tensor | None, site: int, back: PackedCSR,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``(signed coefficients [T, E, H] in the transpose's order, loss [T, M, H], the hubs' parts of it [T, P, H])``.

    ``loss[j] = sum over the out-edges of j of alpha * slope(e) * delta``; the rows of hubs are not written, their parts
    are to be added.
    """
    work = back.work
    M, H = a_src.shape[-2:]
    N, tasks = stats.shape[-3], a_src.shape[:-2].numel()
    a_src, s_src = spaced_rows(a_src, 1)
    out, loss = a_src.new_empty(tasks, back.num_edges, H), stats.new_empty(tasks, M, H)
    partials = work.hub_of_partial.numel()
    part = stats.new_empty(tasks, max(partials, 1), H)
    tile = choose_coefficient_launch(H, "backward").tile
    _coefficients_back_kernel[_grid(back, H, tile, tasks)](
        stats, a_src, stats if rate is None else rate.contiguous(), stats if clock is None else clock.contiguous(),
        back.indices, back.perm, *work_items(back), out, loss, part,
        work.heavy_row.numel(), work.light_row.numel(), partials, M, N, back.num_edges,
        slope, site, per_task_stride(rate, tasks, 1), per_task_stride(clock, tasks, 2),
        H=H, S_SRC=s_src, DROP=rate is not None, ACC=triton_acc(stats.dtype), **tile,
    )  # fmt: skip
    return out, loss, part
