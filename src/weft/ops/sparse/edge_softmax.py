"""edge_softmax: the softmax of per-edge scores over the in-edges of every destination.

    out[t, e, h] = exp(s[t, e, h] - max) / sum        max and sum over the edges into the same row

Shapes: T tasks, N rows, E edges, H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.ops import cpu
from weft.ops.csr.adjacency import Adjacency, supplied_by_adjacency
from weft.ops.csr.packed import PackedCSR, pack_csr, segment_softmax, segment_sum, unpack_csr
from weft.ops.launch.backend import accumulate_dtype, batch_tasks, custom_op, next_power_of_2, use_triton
from weft.ops.launch.triton_lang import flatten_tasks, tl, triton, triton_acc

# ---- Triton kernels: whole rows
#
# A row that is no hub is finished by one program: its edges are read once for the maximum and the sum, and once more,
# from the cache, to be normalised. Chunks of hubs write their maximum and sum, and a second launch normalises them by
# the totals of their row. Tiles are ``[rows, edges, heads]``; a heavy row has a tile of its own.

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


def edge_softmax_triton(scores: Tensor, csr: PackedCSR, grad: Tensor | None = None) -> Tensor:
    """Launch over ``scores [..., E, H]``; with ``grad``, the gradient of a softmax that gave ``scores``: backward."""
    work = csr.work
    scores_TEH = flatten_tasks(scores, 2)
    other_TEH = scores_TEH if grad is None else flatten_tasks(grad, 2)
    tasks, E, heads = scores_TEH.shape
    out = torch.empty_like(scores_TEH)
    if out.numel() == 0:
        return out.reshape(scores.shape)
    num_heavy, num_light, partials = work.heavy_row.numel(), work.light_row.numel(), work.hub_of_partial.numel()
    part_top = scores.new_empty(tasks, max(partials, 1), heads, dtype=accumulate_dtype(scores.dtype))
    part_sum = torch.empty_like(part_top)
    fixed = {"DOT": grad is not None, "ACC": triton_acc(scores.dtype), "BE": HEAVY_EDGES, "BH": next_power_of_2(heads)}
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


def edge_softmax_torch(scores: Tensor, csr: PackedCSR) -> Tensor:
    """Reference."""
    return segment_softmax(scores.to(accumulate_dtype(scores.dtype)), csr).to(scores.dtype)


def edge_softmax_backward_torch(grad: Tensor, out: Tensor, csr: PackedCSR) -> Tensor:
    """Reference: ``out * (grad - sum over the row of out * grad)``."""
    acc = accumulate_dtype(out.dtype)
    product = out.to(acc) * grad.to(acc)
    return (product - out.to(acc) * segment_sum(product, csr).index_select(-2, csr.rows())).to(out.dtype)


@custom_op("weft::edge_softmax", "(Tensor scores, Tensor[] csr) -> Tensor")
def _edge_softmax_op(scores, csr):
    run = edge_softmax_triton if use_triton(scores) else cpu.edge_softmax if cpu.serves(scores) else edge_softmax_torch
    return run(scores, unpack_csr(csr))


@custom_op("weft::edge_softmax_backward", "(Tensor grad, Tensor out, Tensor[] csr) -> Tensor")
def _edge_softmax_backward_op(grad, out, csr):
    if use_triton(out):
        return edge_softmax_triton(out, unpack_csr(csr), grad)
    run = cpu.edge_softmax_backward if cpu.serves(grad, out) else edge_softmax_backward_torch
    return run(grad, out, unpack_csr(csr))


def _setup(ctx, inputs, output):
    _, ctx.csr = inputs
    ctx.save_for_backward(output)


def _backward(ctx, grad):
    (out,) = ctx.saved_tensors
    return _edge_softmax_backward_op(grad, out, ctx.csr), [None] * len(ctx.csr)


_edge_softmax_op.register_autograd(_backward, setup_context=_setup)
batch_tasks(_edge_softmax_op, like=(0,))
batch_tasks(_edge_softmax_backward_op, like=(1,))


@supplied_by_adjacency
def edge_softmax(adj: Adjacency, scores: Tensor) -> Tensor:
    """Softmax of ``scores [..., E, heads]`` (CSR order) over the in-edges of every row."""
    if scores.dim() < 2 or scores.shape[-2] != adj.num_edges:
        raise InputError(
            f"edge_softmax: scores of shape {tuple(scores.shape)} must be [..., {adj.num_edges} edges, heads]"
        )
    return _edge_softmax_op(scores, pack_csr(adj))
