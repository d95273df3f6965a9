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
from weft.ops.csr.packed import PackedCSR, pack_csr, scatter_extreme, segment_softmax, segment_sum, unpack_csr
from weft.ops.launch.backend import accumulate_dtype, batch_tasks, custom_op, next_power_of_2, use_triton
from weft.ops.launch.triton_lang import tl, triton, triton_acc

# ---- Triton kernels: statistics of the rows, then one pass over the edges


@triton.jit
def _row_stats_kernel(
    scores, other, start, length, maximum, total, num_items, heads, stride_values, stride_stats,
    DOT: tl.constexpr, ACC: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Per work item: the maximum and the sum of exponentials, or (DOT) the sum of products."""
    task = tl.program_id(1).to(tl.int64)
    item = tl.program_id(0) * BR + tl.arange(0, BR)
    valid = item < num_items
    first = tl.load(start + item, mask=valid, other=0).to(tl.int64)
    count = tl.load(length + item, mask=valid, other=0)
    h = tl.arange(0, BH)
    lane = tl.arange(0, BE)
    best = tl.full([BR, BE, BH], float("-inf"), ACC)
    added = tl.zeros([BR, BE, BH], ACC)
    for base in range(0, tl.max(count, 0), BE):
        inside = ((base + lane)[None, :] < count[:, None])[:, :, None] & (h < heads)[None, None, :]
        edge = first[:, None] + (base + lane)[None, :]
        at = task * stride_values + edge[:, :, None] * heads + h[None, None, :]
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
    at_stats = task * stride_stats + item.to(tl.int64)[:, None] * heads + h[None, :]
    mask = valid[:, None] & (h < heads)[None, :]
    if DOT:
        tl.store(total + at_stats, tl.sum(added, 1), mask=mask)
    else:
        top = tl.max(best, 1)
        shift = tl.where(top == float("-inf"), 0.0, top)
        tl.store(maximum + at_stats, top, mask=mask)
        tl.store(total + at_stats, tl.sum(added * tl.exp(best - shift[:, None, :]), 1), mask=mask)


@triton.jit
def _normalise_kernel(
    scores, other, rows, maximum, total, out, count, heads, stride_values, stride_stats,
    DOT: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Edge by edge: ``exp(s - max) / sum``, or (DOT) ``out * (grad - sum of products)``."""
    task = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(rows + at // heads, mask=inside, other=0).to(tl.int64)
    stat = task * stride_stats + row * heads + at % heads
    value = tl.load(scores + task * stride_values + at, mask=inside, other=0.0).to(ACC)
    summed = tl.load(total + stat, mask=inside, other=1.0)
    if DOT:
        result = value * (tl.load(other + task * stride_values + at, mask=inside, other=0.0).to(ACC) - summed)
    else:
        result = tl.exp(value - tl.load(maximum + stat, mask=inside, other=0.0)) / summed
    tl.store(out + task * stride_values + at, result.to(out.dtype.element_ty), mask=inside)


def _row_stats_triton(scores_TEH: Tensor, other_TEH: Tensor | None, csr: PackedCSR) -> tuple[Tensor, Tensor]:
    """Maximum and sum of exponentials (or sum of products with ``other``) of every row ``[T, N, H]``."""
    work = csr.work
    assert work is not None
    tasks, _, heads = scores_TEH.shape
    acc = accumulate_dtype(scores_TEH.dtype)
    pieces = []
    for start, length, block_rows, block_edges in (
        (work.heavy_start, work.heavy_len, 1, 256),
        (work.light_start, work.light_len, 32, 4),
    ):
        maximum = scores_TEH.new_empty(tasks, start.numel(), heads, dtype=acc)
        total = torch.empty_like(maximum)
        if start.numel():
            _row_stats_kernel[(-(-start.numel() // block_rows), tasks)](
                scores_TEH, scores_TEH if other_TEH is None else other_TEH, start, length, maximum, total,
                start.numel(), heads, scores_TEH.stride(0), maximum.stride(0),
                DOT=other_TEH is not None, ACC=triton_acc(acc),
                BR=block_rows, BE=block_edges, BH=next_power_of_2(heads), num_warps=4,
            )  # fmt: skip
        pieces.append((maximum, total))
    # Scatter the items' results to their rows; those of a hub are merged in a fixed order.
    (heavy_max, heavy_sum), (light_max, light_sum) = pieces
    partials, softmax = work.hub_of_partial.numel(), other_TEH is None
    maximum = heavy_sum.new_empty(tasks, csr.num_rows, heads)
    total = torch.empty_like(maximum)
    if softmax:
        maximum[:, work.light_row.long()] = light_max
        maximum[:, work.heavy_row[partials:].long()] = heavy_max[:, partials:]
    total[:, work.light_row.long()] = light_sum
    total[:, work.heavy_row[partials:].long()] = heavy_sum[:, partials:]
    if partials:
        hub, part_sum = work.hub_of_partial.long(), heavy_sum[:, :partials]
        if softmax:
            part_max = heavy_max[:, :partials]
            hub_max = part_max.new_full((tasks, work.hub_row.numel(), heads), -torch.inf)
            hub_max = scatter_extreme(hub_max, hub, part_max, "amax")
            maximum[:, work.hub_row.long()] = hub_max
            part_sum = part_sum * (part_max - hub_max[:, hub]).exp()
        parts, offsets = part_sum.movedim(1, 0).contiguous(), work.hub_ptr.long()
        summed = torch.segment_reduce(parts, "sum", offsets=offsets, axis=0, unsafe=True)  # without atomics
        total[:, work.hub_row.long()] = summed.movedim(0, 1)
    return maximum, total


def _edge_softmax_triton(scores: Tensor, other: Tensor | None, csr: PackedCSR) -> Tensor:
    lead, (num_edges, heads) = scores.shape[:-2], scores.shape[-2:]
    tasks = lead.numel()
    scores_TEH = scores.reshape(tasks, num_edges, heads).contiguous()
    other_TEH = None if other is None else other.reshape(tasks, num_edges, heads).contiguous()
    out = torch.empty_like(scores_TEH)
    if out.numel():
        maximum, total = _row_stats_triton(scores_TEH, other_TEH, csr)
        rows = csr.row_of_edge if csr.row_of_edge.numel() else csr.rows()
        acc = triton_acc(scores.dtype)
        _normalise_kernel[(-(-num_edges * heads // 1024), out.shape[0])](
            scores_TEH, scores_TEH if other_TEH is None else other_TEH, rows, maximum, total, out,
            num_edges * heads, heads, scores_TEH.stride(0), total.stride(0),
            DOT=other is not None, ACC=acc, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return out.reshape(*lead, num_edges, heads)


def edge_softmax_triton(scores: Tensor, csr: PackedCSR) -> Tensor:
    """Launch the forward over ``scores [..., E, H]``."""
    return _edge_softmax_triton(scores, None, csr)


def edge_softmax_backward_triton(grad: Tensor, out: Tensor, csr: PackedCSR) -> Tensor:
    """Launch the backward."""
    return _edge_softmax_triton(out, grad, csr)


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
        return edge_softmax_backward_triton(grad, out, unpack_csr(csr))
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
    return _edge_softmax_op(scores, pack_csr(adj, rows=True))
