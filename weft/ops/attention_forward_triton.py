"""Triton kernels of ``attention.py``, forward: scores, softmax and weighted sum in one pass over the edges.

Two other ways were measured on an H200 (arxiv shape) and were no faster: two edges of a lane in flight (0.98 ms
against 0.86 for 4 heads of 40), and the softmax's statistics in a pass of their own before the sums (0.84 and, for
4 heads of 16, 0.22 against 0.19).
"""

from __future__ import annotations

from torch import Tensor

from weft.ops.backend import accumulate_dtype
from weft.ops.lanes_triton import (
    AttentionLaunch,
    choose_forward_launch,
    finish_rows,
    merge_hubs_kernel,
    merge_lanes,
    spaced_rows,
)
from weft.ops.lang import tl, triton
from weft.ops.launch import per_task_stride, triton_acc
from weft.ops.random_triton import keep_scale, mix_key
from weft.ops.walk import Walk


@triton.jit
def _meet_edge(
    x, a_src, indices, edge, inside, dst, h, d, H, D, slope, key, rate, top, total, total_plus, acc, acc_plus,
    S_X: tl.constexpr, S_SRC: tl.constexpr, PLUS: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr,
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
    at = col[:, None, None] * S_X + h[None, :, None] * D + d[None, None, :]
    value = tl.load(x + at, mask=heads[:, :, None] & (d < D)[None, None, :], other=0.0).to(ACC)
    acc = acc * fade[:, :, None] + kept[:, :, None] * value
    total = total * fade + share
    if PLUS:
        positive = argument > 0
        acc_plus = acc_plus * fade[:, :, None] + tl.where(positive, kept, 0.0)[:, :, None] * value
        total_plus = total_plus * fade + tl.where(positive, share, 0.0)
    return higher, total, total_plus, acc, acc_plus


@triton.jit
def _forward_kernel(
    x, a_src, a_dst, rate, clock, indices,
    heavy_start, heavy_len, heavy_row, light_start, light_len, light_row, hub_row, hub_of_partial,
    out, out_plus, alpha_plus, log_sum, part_stats, part_acc,
    num_heavy, num_light, num_partial, M, N, slope, site, stride_rate, stride_clock,
    H: tl.constexpr, D: tl.constexpr, S_X: tl.constexpr, S_SRC: tl.constexpr, S_DST: tl.constexpr, PLUS: tl.constexpr,
    DROP: tl.constexpr, ACC: tl.constexpr, L: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    d = tl.arange(0, BD)
    lane = tl.arange(0, L)
    x += task * M * S_X
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
        for first in range(0, length_one, L):
            place = first + lane
            top, total, total_plus, acc, acc_plus = _meet_edge(
                x, a_src, indices, start_one + place, place < length_one, dst_one, h, d, H, D, slope, key, fraction,
                top, total, total_plus, acc, acc_plus, S_X, S_SRC, PLUS, DROP, ACC,
            )  # fmt: skip
        top1, total1, plus1, acc1, acc_plus1 = merge_lanes(top, total, total_plus, acc, acc_plus, PLUS)
        if piece < num_partial:
            at_h_one = (task * num_partial + piece) * H + h
            at_d_one = at_h_one[:, None] * D + d[None, :]
            mask_d_one = (h < H)[:, None] & (d < D)[None, :]
            size_h = tl.num_programs(2).to(tl.int64) * num_partial * H
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
        for step in range(tl.max(length, 0)):
            top, total, total_plus, acc, acc_plus = _meet_edge(
                x, a_src, indices, start + step, step < length, dst, h, d, H, D, slope, key, fraction,
                top, total, total_plus, acc, acc_plus, S_X, S_SRC, PLUS, DROP, ACC,
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


def attention_forward_triton(
    x: Tensor, a_src: Tensor, a_dst: Tensor, slope: float, rate: Tensor | None, clock: Tensor | None, site: int,
    walk: Walk, training: bool, launch: AttentionLaunch | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``(out, out_plus, alpha_plus, log_sum)``; the last three are left unwritten unless ``training``."""
    work = walk.work
    M, H, D = x.shape[-3:]
    N, lead = walk.num_rows, x.shape[:-3]
    tasks, acc = lead.numel(), accumulate_dtype(x.dtype)
    (x, s_x), (a_src, s_src), (a_dst, s_dst) = spaced_rows(x, 2), spaced_rows(a_src, 1), spaced_rows(a_dst, 1)
    out, out_plus = x.new_empty(*lead, N, H, D), x.new_empty(*lead, N, H, D)
    alpha_plus, log_sum = x.new_empty(*lead, N, H, dtype=acc), x.new_empty(*lead, N, H, dtype=acc)
    if out.numel():
        launch = launch or choose_forward_launch(H, D)
        partials = work.hub_of_partial.numel()
        part_stats = x.new_empty(3, tasks, max(partials, 1), H, dtype=acc)
        part_acc = x.new_empty(2, tasks, max(partials, 1), H, D, dtype=acc)
        heads = -(-H // launch.block_heads)
        num_heavy, num_light = work.heavy_row.numel(), work.light_row.numel()
        tile = {"L": launch.lanes, "BH": launch.block_heads, "BD": launch.block_width, "num_warps": launch.num_warps}
        _forward_kernel[(num_heavy + -(-num_light // launch.lanes), heads, tasks)](
            x, a_src, a_dst, x if rate is None else rate.contiguous(), x if clock is None else clock.contiguous(),
            walk.indices, work.heavy_start, work.heavy_len, work.heavy_row,
            work.light_start, work.light_len, work.light_row, work.hub_row, work.hub_of_partial,
            out, out_plus, alpha_plus, log_sum, part_stats, part_acc,
            num_heavy, num_light, partials, M, N, slope, site,
            per_task_stride(rate, tasks, 1), per_task_stride(clock, tasks, 2),
            H=H, D=D, S_X=s_x, S_SRC=s_src, S_DST=s_dst, PLUS=training, DROP=rate is not None,
            ACC=triton_acc(x.dtype), **tile,
        )  # fmt: skip
        if partials:
            merge_hubs_kernel[(work.hub_row.numel(), heads, tasks)](
                part_stats, part_acc, work.hub_ptr, work.hub_row, out, out_plus, alpha_plus, log_sum, partials, N,
                H=H, D=D, LOG=training, PLUS=training, ACC=triton_acc(x.dtype), **tile,
            )  # fmt: skip
    return out, out_plus, alpha_plus, log_sum
