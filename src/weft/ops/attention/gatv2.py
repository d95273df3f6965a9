"""graph_attention_v2: GATv2's attention in one pass, without arrays of size E x F in memory.

    s[e, h]      = <att[h], leaky_relu(x_src[j, h] + x_dst[i, h])>          for e = (j -> i)
    alpha[e, h]  = softmax of s over the in-edges of i
    out[i, h, :] = sum over e of keep[e, h] / (1 - rate) * alpha[e, h] * x_src[j, h, :]

The backward pass goes over the graph for ``d x_dst`` and ``d att`` and over the transpose for ``d x_src``.
Shapes: T tasks, N rows, M columns, E edges, H heads, D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from weft.core.errors import InputError
from weft.ops import cpu
from weft.ops.attention.gat import coefficient_mask, register_gradient
from weft.ops.csr.adjacency import Adjacency, supplied_by_adjacency
from weft.ops.csr.packed import (
    PackedCSR,
    pack_csr,
    pack_csr_backward,
    segment_log_sum_exp,
    segment_softmax,
    segment_sum,
    unpack_csr,
)
from weft.ops.csr.worklist import heavy_owner, heavy_piece, light_rows
from weft.ops.launch.backend import accumulate_dtype, batch_tasks, custom_op, rate_and_clock, use_triton
from weft.ops.launch.triton_lang import flatten_tasks, per_task_stride, tl, triton, triton_acc
from weft.ops.random_bits_triton import drop_key, keep_scale, mask_row
from weft.ops.sparse.lanes_triton import (
    AttentionLaunch,
    add_hub_parts,
    choose_backward_launch,
    choose_forward_launch,
    finish_rows,
    merge_hubs_kernel,
    merge_lanes,
)

# ---- Triton kernels: built like GAT's (``lanes_triton.py`` explains lanes)


@triton.jit
def _score(z, att, slope):
    """``leaky_relu(z)`` and its product with the attention vector, summed over a head's features."""
    bent = tl.where(z > 0, z, z * slope)
    return bent, tl.sum(bent * att, 2)


@triton.jit
def _meet_edge(
    x_src, indices, edge, inside, dst, att, h, d, H, D, slope, key, rate, top, total, acc,
    DROP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    col = tl.load(indices + edge, mask=inside, other=0).to(tl.int64)
    heads = inside[:, None] & (h < H)[None, :]
    at = col[:, None, None] * (H * D) + h[None, :, None] * D + d[None, None, :]
    value = tl.load(x_src + at, mask=heads[:, :, None] & (d < D)[None, None, :], other=0.0).to(ACC)
    _, score = _score(value + dst, att, slope)
    score = tl.where(heads, score, float("-inf"))
    higher = tl.maximum(top, score)
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp(top - shift)
    share = tl.exp(score - shift)
    kept = share
    if DROP:
        kept = share * keep_scale(mask_row(key, edge)[:, None], rate, h[None, :]).to(ACC)
    return higher, total * fade + share, acc * fade[:, :, None] + kept[:, :, None] * value


@triton.jit
def _forward_kernel(
    x_src, x_dst, att, rate, clock, indices,
    heavy_start, heavy_len, heavy_row, light_start, light_len, light_row, hub_row, hub_of_partial,
    out, log_sum, part_stats, part_acc,
    num_heavy, num_light, num_partial, M, N, slope, site, stride_att, stride_rate, stride_clock,
    H: tl.constexpr, D: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr,
    L: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    d = tl.arange(0, BD)
    lane = tl.arange(0, L)
    mask_hd = (h < H)[:, None] & (d < D)[None, :]
    x_src += task * M * H * D
    x_dst += task * N * H * D
    out += task * N * H * D
    log_sum += task * N * H
    vector = tl.load(att + task * stride_att + h[:, None] * D + d[None, :], mask=mask_hd, other=0.0).to(ACC)[None, :, :]
    key, fraction = drop_key(clock, rate, task, site, stride_clock, stride_rate, DROP)
    top = tl.full([L, BH], float("-inf"), ACC)
    total = tl.zeros([L, BH], ACC)
    acc = tl.zeros([L, BH, BD], ACC)
    if piece < num_heavy:
        start_one, length_one = heavy_piece(piece, heavy_start, heavy_len)
        row_one = heavy_owner(piece, heavy_row, hub_row, hub_of_partial, num_partial)
        dst_one = tl.load(x_dst + (row_one * H + h)[:, None] * D + d[None, :], mask=mask_hd, other=0.0).to(ACC)[
            None, :, :
        ]
        for first in range(0, length_one, L):
            top, total, acc = _meet_edge(
                x_src, indices, start_one + first + lane, first + lane < length_one, dst_one, vector, h, d, H, D, slope,
                key, fraction, top, total, acc, DROP, ACC,
            )  # fmt: skip
        top1, total1, acc1 = merge_lanes(top, total, acc)
        if piece < num_partial:
            at_h_one = (task * num_partial + piece) * H + h
            size_h = tl.num_programs(2).to(tl.int64) * num_partial * H
            tl.store(part_stats + at_h_one, top1, mask=h < H)
            tl.store(part_stats + size_h + at_h_one, total1, mask=h < H)
            tl.store(part_acc + at_h_one[:, None] * D + d[None, :], acc1, mask=mask_hd)
        else:
            one = tl.zeros([1], tl.int64)
            finish_rows(
                out, log_sum, one + row_one, one == 0, h, d, H, D, top1[None, :], total1[None, :], acc1[None, :, :],
            )  # fmt: skip
    else:
        item = (piece - num_heavy) * L + lane
        start, length, row, valid = light_rows(item, light_start, light_len, light_row, num_light)
        at_d = (row[:, None] * H + h[None, :])[:, :, None] * D + d[None, None, :]
        dst = tl.load(x_dst + at_d, mask=valid[:, None, None] & mask_hd[None, :, :], other=0.0).to(ACC)
        for step in range(tl.max(length, 0)):
            top, total, acc = _meet_edge(
                x_src, indices, start + step, step < length, dst, vector, h, d, H, D, slope, key, fraction,
                top, total, acc, DROP, ACC,
            )  # fmt: skip
        finish_rows(out, log_sum, row, valid, h, d, H, D, top, total, acc)


@triton.jit
def _edge_gradient(
    near, near_grad, far, far_grad, stats, near_stats, att, indices, perm, edge, inside, h, d, H, D, slope, key, rate,
    sum_near, sum_att, TRANSPOSED: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One edge per lane. Over the graph: near is the destination. TRANSPOSED: near is the source."""
    col = tl.load(indices + edge, mask=inside, other=0).to(tl.int64)
    mask_h = inside[:, None] & (h < H)[None, :]
    mask_d = mask_h[:, :, None] & (d < D)[None, None, :]
    at_h = col[:, None] * H + h[None, :]
    at_d = at_h[:, :, None] * D + d[None, None, :]
    distant = tl.load(far + at_d, mask=mask_d, other=0.0).to(ACC)
    position = edge
    if TRANSPOSED:
        gradient = tl.load(far_grad + at_d, mask=mask_d, other=0.0).to(ACC)
        source = near
        log_total = tl.load(stats + at_h * 2, mask=mask_h, other=0.0)
        delta = tl.load(stats + at_h * 2 + 1, mask=mask_h, other=0.0)
        if DROP:
            position = tl.load(perm + edge, mask=inside, other=0).to(tl.int64)
    else:
        gradient = near_grad
        source = distant
        log_total, delta = near_stats
    z = near + distant
    bent, score = _score(z, att, slope)
    alpha = tl.where(mask_h, tl.exp(score - log_total), 0.0)
    kept = alpha
    if DROP:
        kept = alpha * keep_scale(mask_row(key, position)[:, None], rate, h[None, :]).to(ACC)
    d_score = kept * tl.sum(gradient * source, 2) - alpha * delta
    sum_near += d_score[:, :, None] * att * tl.where(z > 0, 1.0, slope)
    if TRANSPOSED:
        sum_near += kept[:, :, None] * gradient
    else:
        sum_att += d_score[:, :, None] * bent
    return sum_near, sum_att


@triton.jit
def _backward_kernel(
    near_x, far_x, grad, stats, att, rate, clock, indices, perm,
    heavy_start, heavy_len, heavy_row, light_start, light_len, light_row, hub_row, hub_of_partial,
    grad_near, part_near, part_att,
    num_heavy, num_light, num_partial, num_near, num_far, slope, site, stride_att, stride_rate, stride_clock,
    H: tl.constexpr, D: tl.constexpr, TRANSPOSED: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr,
    L: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Over the graph: gradient of x_dst and of att. TRANSPOSED: gradient of x_src."""
    piece = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    d = tl.arange(0, BD)
    lane = tl.arange(0, L)
    mask_hd = (h < H)[:, None] & (d < D)[None, :]
    near_x += task * num_near * H * D
    far_x += task * num_far * H * D
    num_rows = num_far if TRANSPOSED else num_near
    grad += task * num_rows * H * D
    stats += task * num_rows * H * 2
    grad_near += task * num_near * H * D
    vector = tl.load(att + task * stride_att + h[:, None] * D + d[None, :], mask=mask_hd, other=0.0).to(ACC)[None, :, :]
    key, fraction = drop_key(clock, rate, task, site, stride_clock, stride_rate, DROP)
    sum_near = tl.zeros([L, BH, BD], ACC)
    sum_att = tl.zeros([L, BH, BD], ACC)
    if piece < num_heavy:
        start_one, length_one = heavy_piece(piece, heavy_start, heavy_len)
        row_one = heavy_owner(piece, heavy_row, hub_row, hub_of_partial, num_partial)
        at_h_one = row_one * H + h
        at_d_one = at_h_one[:, None] * D + d[None, :]
        near_one = tl.load(near_x + at_d_one, mask=mask_hd, other=0.0).to(ACC)[None, :, :]
        near_grad_one = near_one
        log_total_one = tl.zeros([1, BH], ACC)
        delta_one = tl.zeros([1, BH], ACC)
        if not TRANSPOSED:
            near_grad_one = tl.load(grad + at_d_one, mask=mask_hd, other=0.0).to(ACC)[None, :, :]
            log_total_one = tl.load(stats + at_h_one * 2, mask=h < H, other=0.0)[None, :]
            delta_one = tl.load(stats + at_h_one * 2 + 1, mask=h < H, other=0.0)[None, :]
        for first in range(0, length_one, L):
            sum_near, sum_att = _edge_gradient(
                near_one, near_grad_one, far_x, grad, stats, (log_total_one, delta_one), vector, indices, perm,
                start_one + first + lane, first + lane < length_one, h, d, H, D, slope, key, fraction, sum_near,
                sum_att, TRANSPOSED, DROP, ACC,
            )  # fmt: skip
        summed = tl.sum(sum_near, 0)
        if piece < num_partial:
            slot = ((task * num_partial + piece) * H + h)[:, None] * D + d[None, :]
            tl.store(part_near + slot, summed, mask=mask_hd)
        else:
            tl.store(grad_near + at_d_one, summed.to(grad_near.dtype.element_ty), mask=mask_hd)
    else:
        item = (piece - num_heavy) * L + lane
        start, length, row, valid = light_rows(item, light_start, light_len, light_row, num_light)
        mask_h = valid[:, None] & (h < H)[None, :]
        mask_d = mask_h[:, :, None] & (d < D)[None, None, :]
        at_h = row[:, None] * H + h[None, :]
        at_d = at_h[:, :, None] * D + d[None, None, :]
        near = tl.load(near_x + at_d, mask=mask_d, other=0.0).to(ACC)
        near_grad = near
        log_total = tl.zeros([L, BH], ACC)
        delta = tl.zeros([L, BH], ACC)
        if not TRANSPOSED:
            near_grad = tl.load(grad + at_d, mask=mask_d, other=0.0).to(ACC)
            log_total = tl.load(stats + at_h * 2, mask=mask_h, other=0.0)
            delta = tl.load(stats + at_h * 2 + 1, mask=mask_h, other=0.0)
        for step in range(tl.max(length, 0)):
            sum_near, sum_att = _edge_gradient(
                near, near_grad, far_x, grad, stats, (log_total, delta), vector, indices, perm, start + step,
                step < length, h, d, H, D, slope, key, fraction, sum_near, sum_att, TRANSPOSED, DROP, ACC,
            )  # fmt: skip
        tl.store(grad_near + at_d, sum_near.to(grad_near.dtype.element_ty), mask=mask_d)
    if not TRANSPOSED:
        slot = ((task * tl.num_programs(0) + piece) * H + h)[:, None] * D + d[None, :]
        tl.store(part_att + slot, tl.sum(sum_att, 0), mask=mask_hd)


def attention_v2_forward_triton(
    x_src: Tensor, x_dst: Tensor, att: Tensor, slope: float, rate: Tensor | None, clock: Tensor | None, site: int,
    csr: PackedCSR, launch: AttentionLaunch | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(out [..., N, H, D], log_sum [..., N, H])``."""
    work = csr.work
    M, H, D = x_src.shape[-3:]
    N = csr.num_rows
    src_T, dst_T, att = flatten_tasks(x_src, 3), flatten_tasks(x_dst, 3), att.contiguous()
    tasks, acc = src_T.shape[0], accumulate_dtype(x_src.dtype)
    out = torch.empty_like(dst_T)
    log_sum = out.new_empty(tasks, N, H, dtype=acc)
    if out.numel():
        launch = launch or choose_forward_launch(H, D)
        partials = work.hub_of_partial.numel()
        part_stats = out.new_empty(2, tasks, max(partials, 1), H, dtype=acc)
        part_acc = out.new_empty(tasks, max(partials, 1), H, D, dtype=acc)
        heads = -(-H // launch.block_heads)
        num_heavy, num_light = work.heavy_row.numel(), work.light_row.numel()
        _forward_kernel[(num_heavy + -(-num_light // launch.lanes), heads, tasks)](
            src_T, dst_T, att, out if rate is None else rate.contiguous(), out if clock is None else clock.contiguous(),
            csr.indices, work.heavy_start, work.heavy_len, work.heavy_row,
            work.light_start, work.light_len, work.light_row, work.hub_row, work.hub_of_partial,
            out, log_sum, part_stats, part_acc, num_heavy, num_light, partials, M, N, slope, site,
            per_task_stride(att, tasks, H * D), per_task_stride(rate, tasks, 1), per_task_stride(clock, tasks, 2),
            H=H, D=D, DROP=rate is not None, ACC=triton_acc(x_src.dtype),
            L=launch.lanes, BH=launch.block_heads, BD=launch.block_width, num_warps=launch.num_warps,
        )  # fmt: skip
        if partials:
            merge_hubs_kernel[(work.hub_row.numel(), heads, tasks)](
                part_stats, part_acc, work.hub_ptr, work.hub_row, out, log_sum, partials, N,
                H=H, D=D, ACC=triton_acc(x_src.dtype),
                L=launch.lanes, BH=launch.block_heads, BD=launch.block_width, num_warps=launch.num_warps,
            )  # fmt: skip
    return out.reshape(x_dst.shape), log_sum.reshape(x_dst.shape[:-1])


def attention_v2_backward_launches(
    grad: Tensor, x_src: Tensor, x_dst: Tensor, att: Tensor, delta: Tensor, log_sum: Tensor, slope: float,
    rate: Tensor | None, clock: Tensor | None, site: int, csr: PackedCSR, back: PackedCSR,
    launch: AttentionLaunch | None = None,
) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """Launch both passes, over the graph and over the transpose.

    What is returned adds up their parts once they have run: ``(grad_x_src, grad_x_dst, grad_att)``.
    """
    H, D = x_src.shape[-2:]
    launch = launch or choose_backward_launch(H, D)
    src_T, dst_T, grad_T = flatten_tasks(x_src, 3), flatten_tasks(x_dst, 3), flatten_tasks(grad, 3)
    tasks = src_T.shape[0]
    stats = torch.stack([log_sum, delta], -1).reshape(tasks, -1, H, 2)
    shared = (grad_T, stats, att.contiguous(), slope, rate, clock, site, launch)
    grad_dst, part_att = _backward_pass(dst_T, src_T, *shared, csr, transposed=False)
    grad_src, _ = _backward_pass(src_T, dst_T, *shared, back, transposed=True)

    def finish() -> tuple[Tensor, Tensor, Tensor]:
        summed = part_att.sum(1)
        grad_att = (summed if att.numel() == summed.numel() else summed.sum(0)).reshape(att.shape)
        return grad_src.reshape(x_src.shape), grad_dst.reshape(x_dst.shape), grad_att.to(att.dtype)

    return finish


def _backward_pass(near, far, grad, stats, att, slope, rate, clock, site, launch, csr: PackedCSR, *, transposed: bool):
    """One pass; ``near`` are the rows of ``csr``. Returns their gradient and the parts of att's."""
    work = csr.work
    tasks, num_near, H, D = near.shape
    acc = accumulate_dtype(near.dtype)
    partials = work.hub_of_partial.numel()
    num_heavy, num_light = work.heavy_row.numel(), work.light_row.numel()
    programs = num_heavy + -(-num_light // launch.lanes)
    grad_near = torch.empty_like(near)
    part_near = near.new_empty(tasks, max(partials, 1), H * D, dtype=acc)
    part_att = near.new_zeros(tasks, 0 if transposed else programs, H, D, dtype=acc)
    if grad_near.numel():
        _backward_kernel[(programs, -(-H // launch.block_heads), tasks)](
            near, far, grad, stats, att, near if rate is None else rate.contiguous(),
            near if clock is None else clock.contiguous(), csr.indices, csr.perm if transposed else csr.indices,
            work.heavy_start, work.heavy_len, work.heavy_row, work.light_start, work.light_len, work.light_row,
            work.hub_row, work.hub_of_partial, grad_near, part_near, part_att if part_att.numel() else part_near,
            num_heavy, num_light, partials, num_near, far.shape[1], slope, site,
            per_task_stride(att, tasks, H * D), per_task_stride(rate, tasks, 1), per_task_stride(clock, tasks, 2),
            H=H, D=D, TRANSPOSED=transposed, DROP=rate is not None, ACC=triton_acc(near.dtype),
            L=launch.lanes, BH=launch.block_heads, BD=launch.block_width, num_warps=launch.num_warps,
        )  # fmt: skip
        if partials:
            add_hub_parts(part_near, work, grad_near, num_near)
    return grad_near, part_att


def _edge_scores(x_src: Tensor, x_dst: Tensor, att: Tensor, slope: float, csr: PackedCSR) -> tuple[Tensor, Tensor]:
    """``(argument [..., E, H, D], score [..., E, H])`` in the accumulation type."""
    acc = accumulate_dtype(x_src.dtype)
    argument = x_src.index_select(-3, csr.indices.long()).to(acc) + x_dst.index_select(-3, csr.rows()).to(acc)
    return argument, (leaky_relu(argument, slope) * att[..., None, :, :].to(acc)).sum(-1)


def attention_v2_torch(x_src, x_dst, att, slope, mask, csr: PackedCSR) -> Tensor:
    """Reference, differentiable by autograd: materialises ``[..., E, H, D]``."""
    _, scores = _edge_scores(x_src, x_dst, att, slope, csr)
    alpha = segment_softmax(scores, csr)
    if mask is not None:
        alpha = alpha * mask
    messages = alpha[..., None] * x_src.index_select(-3, csr.indices.long()).to(alpha.dtype)
    return segment_sum(messages.flatten(-2), csr).unflatten(-1, x_src.shape[-2:]).to(x_src.dtype)


def attention_v2_forward_torch(x_src, x_dst, att, slope, rate, clock, site, csr: PackedCSR):
    """``(out, log of the softmax's denominator)``: reference for the fused forward."""
    mask = coefficient_mask(rate, clock, site, csr.num_edges, x_src.shape[-2])
    out = attention_v2_torch(x_src, x_dst, att, slope, mask, csr)
    _, scores = _edge_scores(x_src, x_dst, att, slope, csr)
    return out, segment_log_sum_exp(scores, csr)


def attention_v2_backward_torch(
    grad, x_src, x_dst, att, delta, log_sum, slope, rate, clock, site, csr: PackedCSR, back: PackedCSR | None = None
):
    """``(grad_x_src, grad_x_dst, grad_att)``: reference for the two passes of the backward."""
    cols, rows = csr.indices.long(), csr.rows()
    argument, scores = _edge_scores(x_src, x_dst, att, slope, csr)
    acc = scores.dtype
    alpha = (scores - log_sum.index_select(-2, rows)).exp()
    mask = coefficient_mask(rate, clock, site, csr.num_edges, x_src.shape[-2])
    dropped = alpha if mask is None else alpha * mask
    grad_e = grad.index_select(-3, rows).to(acc)
    dots = (grad_e * x_src.index_select(-3, cols).to(acc)).sum(-1)
    d_score = dropped * dots - alpha * delta.index_select(-2, rows)
    slope_e = torch.where(argument > 0, 1.0, slope).to(acc)
    d_argument = d_score[..., None] * slope_e * att[..., None, :, :].to(acc)
    grad_att = (d_score[..., None] * argument * slope_e).sum(-3).sum_to_size(att.shape)
    grad_dst = x_dst.new_zeros(x_dst.shape, dtype=acc).index_add(-3, rows, d_argument)
    grad_src = x_src.new_zeros(x_src.shape, dtype=acc)
    grad_src = grad_src.index_add(-3, cols, d_argument + dropped[..., None] * grad_e)
    return grad_src.to(x_src.dtype), grad_dst.to(x_dst.dtype), grad_att.to(att.dtype)


@custom_op(
    "weft::graph_attention_v2",
    "(Tensor x_src, Tensor x_dst, Tensor att, float slope, Tensor? rate, Tensor? clock, int site,"
    " Tensor[] csr, Tensor[] back) -> (Tensor, Tensor)",
)
def _op(x_src, x_dst, att, slope, rate, clock, site, csr, back):
    if use_triton(x_src):
        return attention_v2_forward_triton(x_src, x_dst, att, slope, rate, clock, site, unpack_csr(csr))
    serve = cpu.attention_v2_forward if cpu.serves(x_src, x_dst, att) else attention_v2_forward_torch
    return serve(x_src, x_dst, att, slope, rate, clock, site, unpack_csr(csr))


@custom_op(
    "weft::graph_attention_v2_backward",
    "(Tensor grad, Tensor x_src, Tensor x_dst, Tensor att, Tensor delta, Tensor log_sum, float slope,"
    " Tensor? rate, Tensor? clock, int site, Tensor[] csr, Tensor[] back) -> (Tensor, Tensor, Tensor)",
)
def _backward_op(grad, x_src, x_dst, att, delta, log_sum, slope, rate, clock, site, csr, back):
    saved = grad, x_src, x_dst, att, delta, log_sum, slope, rate, clock, site, unpack_csr(csr), unpack_csr(back)
    if use_triton(x_src):
        return attention_v2_backward_launches(*saved)()
    return (cpu.attention_v2_backward if cpu.serves(x_src, x_dst, att) else attention_v2_backward_torch)(*saved)


@_op.register_fake
def _fake(x_src, x_dst, att, slope, rate, clock, site, csr, back):
    out = torch.empty_like(x_dst, memory_format=torch.contiguous_format)
    return out, out.new_empty(out.shape[:-1], dtype=accumulate_dtype(out.dtype))


def _gradients(grad, x_src, x_dst, att, out, *saved):
    grad, acc = grad.contiguous(), accumulate_dtype(out.dtype)
    delta = (grad.to(acc) * out.to(acc)).sum(-1)
    return _backward_op(grad, x_src, x_dst, att, delta, *saved)


register_gradient(_op, _gradients)
batch_tasks(_op)
batch_tasks(_backward_op, like=(1, 2, 3))


@supplied_by_adjacency
def graph_attention_v2(
    adj: Adjacency,
    x_src: Tensor,
    x_dst: Tensor,
    att: Tensor,
    slope: float = 0.2,
    dropout: float | Tensor = 0.0,
    clock: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """GATv2's attention: ``x_src [..., M, H, D]``, ``x_dst [..., N, H, D]``, ``att [..., H, D]``.

    Returns ``[..., N, H, D]``. ``dropout`` falls on the normalised coefficients and needs a ``clock``.
    """
    if x_src.shape[-3] != adj.num_cols or x_dst.shape[-3] != adj.num_rows:
        raise InputError(
            f"graph_attention_v2: x_src has {x_src.shape[-3]} rows and x_dst {x_dst.shape[-3]};"
            f" the adjacency is {adj.num_rows} x {adj.num_cols}"
        )
    rate, clock = rate_and_clock(dropout, clock, x_src.device)
    csr = pack_csr(adj, by_length=True)  # the gradient of att is a sum over all rows
    return _op(x_src, x_dst, att, slope, rate, clock, site, csr, pack_csr_backward(adj))[0]
