"""spmm_max: the largest neighbour, feature by feature.

    out[t, i, f] = max over e = (j -> i) of weight[e] * x[t, j, f];  0 for rows without edges

The winning edge is kept (the first one on a tie), so the backward pass is a gather over the transpose and
needs no atomics. Shapes: T tasks, N rows, M columns, E edges, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops import cpu
from weft.ops.csr.adjacency import Adjacency, supplied_by_adjacency
from weft.ops.csr.packed import PackedCSR, pack_csr, pack_csr_backward, scatter_extreme, unpack_csr
from weft.ops.csr.worklist import heavy_piece, light_rows
from weft.ops.launch.backend import accumulate_dtype, batch_tasks, custom_op, next_power_of_2, use_triton
from weft.ops.launch.triton_lang import constant, flatten_tasks, tl, triton, triton_acc
from weft.ops.sparse.lanes_triton import add_hub_parts

# ---- Triton kernels: maximum with its winning edge, and the gather of its backward

NO_EDGE = constant(2**62)


@triton.jit
def _meet_edge(
    x, w, indices, edge, inside, f, in_f, F, best, winner, HAS_W: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """One edge per lane: keep the larger value; the earlier edge on a tie."""
    col = tl.load(indices + edge, mask=inside, other=0).to(tl.int64)
    mask = inside[:, None] & in_f[None, :]
    value = tl.load(x + col[:, None] * F + f[None, :], mask=mask, other=float("-inf")).to(ACC)
    if HAS_W:
        value *= tl.load(w + edge, mask=inside, other=1.0).to(ACC)[:, None]
    # A NaN wins and stays, as it does in torch.amax.
    larger = mask & ((value > best) | ((value != value) & (best == best)) | (winner == NO_EDGE))
    return tl.where(larger, value, best), tl.where(larger, edge[:, None], winner)


@triton.jit
def _merge_lanes(best, winner):
    """The larger of the lanes of one row, the earlier edge on a tie: ``[L, BF]`` to ``[BF]``."""
    is_nan = best != best
    any_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    top = tl.max(tl.where(is_nan, float("-inf"), best), 0)
    wins = tl.where(any_nan[None, :], is_nan, best == top[None, :])
    first = tl.min(tl.where(wins, winner, NO_EDGE), 0)
    return tl.where(any_nan, float("nan"), top), first


@triton.jit
def _store(out, winners, at, best, winner, mask):
    found = winner != NO_EDGE
    tl.store(out + at, tl.where(found, best, 0.0).to(out.dtype.element_ty), mask=mask)
    tl.store(winners + at, tl.where(found, winner, -1).to(winners.dtype.element_ty), mask=mask)


@triton.jit
def _forward_kernel(
    x, w, indices, heavy_start, heavy_len, heavy_row, light_start, light_len, light_row,
    out, winners, part, part_winner, num_heavy, num_light, num_partial, M, N,
    F: tl.constexpr, HAS_W: tl.constexpr, ACC: tl.constexpr, L: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """One work item and one tile of features of one task."""
    piece = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    in_f = f < F
    lane = tl.arange(0, L)
    x += task * M * F
    best = tl.full([L, BF], float("-inf"), ACC)
    winner = tl.full([L, BF], NO_EDGE, tl.int64)
    if piece < num_heavy:
        start_one, length_one = heavy_piece(piece, heavy_start, heavy_len)
        for first in range(0, length_one, L):
            best, winner = _meet_edge(
                x, w, indices, start_one + first + lane, first + lane < length_one, f, in_f, F, best, winner, HAS_W, ACC
            )
        top, top_winner = _merge_lanes(best, winner)
        if piece < num_partial:
            at_one = (task * num_partial + piece) * F + f
            tl.store(part + at_one, top, mask=in_f)
            tl.store(part_winner + at_one, top_winner, mask=in_f)
        else:
            row_one = tl.load(heavy_row + piece).to(tl.int64)
            _store(out, winners, (task * N + row_one) * F + f, top, top_winner, in_f)
    else:
        item = (piece - num_heavy) * L + lane
        start, length, row, valid = light_rows(item, light_start, light_len, light_row, num_light)
        for step in range(tl.max(length, 0)):
            best, winner = _meet_edge(x, w, indices, start + step, step < length, f, in_f, F, best, winner, HAS_W, ACC)
        at = (task * N + row)[:, None] * F + f[None, :]
        _store(out, winners, at, best, winner, valid[:, None] & in_f[None, :])


@triton.jit
def _merge_hubs_kernel(
    part, part_winner, hub_ptr, hub_row, out, winners, num_partial, N,
    F: tl.constexpr, ACC: tl.constexpr, L: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """The maximum over the chunks of one hub."""
    hub = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    best = tl.full([L, BF], float("-inf"), ACC)
    winner = tl.full([L, BF], NO_EDGE, tl.int64)
    last = tl.load(hub_ptr + hub + 1)
    for first in range(tl.load(hub_ptr + hub), last, L):
        slot = first + tl.arange(0, L)
        mask = (slot < last)[:, None] & (f < F)[None, :]
        at = (task * num_partial + slot)[:, None] * F + f[None, :]
        value = tl.load(part + at, mask=mask, other=float("-inf"))
        edge = tl.load(part_winner + at, mask=mask, other=NO_EDGE)
        larger = mask & ((value > best) | ((value != value) & (best == best)) | (winner == NO_EDGE))
        best = tl.where(larger, value, best)
        winner = tl.where(larger, edge, winner)
    top, top_winner = _merge_lanes(best, winner)
    row = tl.load(hub_row + hub).to(tl.int64)
    _store(out, winners, (task * N + row) * F + f, top, top_winner, f < F)


@triton.jit
def _collect_edge(
    grad, winners, w, indices, perm, edge, inside, f, in_f, F, total, HAS_W: tl.constexpr, ACC: tl.constexpr
):
    """One edge of the transpose per lane: take the gradient if this edge won."""
    col = tl.load(indices + edge, mask=inside, other=0).to(tl.int64)
    position = tl.load(perm + edge, mask=inside, other=0).to(tl.int64)
    mask = inside[:, None] & in_f[None, :]
    at = col[:, None] * F + f[None, :]
    won = mask & (tl.load(winners + at, mask=mask, other=-1).to(tl.int64) == position[:, None])
    value = tl.load(grad + at, mask=won, other=0.0).to(ACC)
    if HAS_W:
        value *= tl.load(w + position, mask=inside, other=0.0).to(ACC)[:, None]
    return total + value


@triton.jit
def _backward_kernel(
    grad, winners, w, indices, perm, heavy_start, heavy_len, heavy_row, light_start, light_len, light_row,
    grad_x, part, num_heavy, num_light, num_partial, M, N,
    F: tl.constexpr, HAS_W: tl.constexpr, ACC: tl.constexpr, L: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """A pass over the transpose: rows are sources (M of them), columns destinations (N)."""
    piece = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    in_f = f < F
    lane = tl.arange(0, L)
    grad += task * N * F
    winners += task * N * F
    total = tl.zeros([L, BF], ACC)
    if piece < num_heavy:
        start_one, length_one = heavy_piece(piece, heavy_start, heavy_len)
        for first in range(0, length_one, L):
            total = _collect_edge(
                grad, winners, w, indices, perm, start_one + first + lane, first + lane < length_one, f, in_f, F, total,
                HAS_W, ACC,
            )  # fmt: skip
        summed = tl.sum(total, 0)
        if piece < num_partial:
            tl.store(part + (task * num_partial + piece) * F + f, summed, mask=in_f)
        else:
            row_one = tl.load(heavy_row + piece).to(tl.int64)
            tl.store(grad_x + (task * M + row_one) * F + f, summed.to(grad_x.dtype.element_ty), mask=in_f)
    else:
        item = (piece - num_heavy) * L + lane
        start, length, row, valid = light_rows(item, light_start, light_len, light_row, num_light)
        for step in range(tl.max(length, 0)):
            total = _collect_edge(
                grad, winners, w, indices, perm, start + step, step < length, f, in_f, F, total, HAS_W, ACC
            )
        at = (task * M + row)[:, None] * F + f[None, :]
        tl.store(grad_x + at, total.to(grad_x.dtype.element_ty), mask=valid[:, None] & in_f[None, :])


def _tile(num_features: int) -> tuple[int, int]:
    """Lanes and features of a tile of 1024 elements."""
    block = min(128, next_power_of_2(num_features))
    return max(1, 1024 // block), block


def spmm_max_triton(x: Tensor, weight: Tensor | None, csr: PackedCSR) -> tuple[Tensor, Tensor]:
    """``(out [..., N, F], winner [..., N, F])``; winner is an edge, or -1 for rows without one."""
    work = csr.work
    x_T = flatten_tasks(x, 2)
    tasks, M, F = x_T.shape
    N = csr.num_rows
    out = x.new_empty(tasks, N, F)
    winners = torch.empty_like(out, dtype=csr.indptr.dtype)
    if out.numel():
        lanes, block = _tile(F)
        partials = work.hub_of_partial.numel()
        part = x.new_empty(tasks, max(partials, 1), F, dtype=accumulate_dtype(x.dtype))
        part_winner = torch.empty_like(part, dtype=torch.int64)
        num_heavy, num_light = work.heavy_row.numel(), work.light_row.numel()
        acc = triton_acc(x.dtype)
        _forward_kernel[(num_heavy + -(-num_light // lanes), -(-F // block), tasks)](
            x_T, x_T if weight is None else weight.contiguous(), csr.indices,
            work.heavy_start, work.heavy_len, work.heavy_row, work.light_start, work.light_len, work.light_row,
            out, winners, part, part_winner, num_heavy, num_light, partials, M, N,
            F=F, HAS_W=weight is not None, ACC=acc, L=lanes, BF=block, num_warps=4,
        )  # fmt: skip
        if partials:
            _merge_hubs_kernel[(work.hub_row.numel(), -(-F // block), tasks)](
                part, part_winner, work.hub_ptr, work.hub_row, out, winners, partials, N,
                F=F, ACC=acc, L=lanes, BF=block, num_warps=4,
            )  # fmt: skip
    shape = (*x.shape[:-2], N, F)
    return out.reshape(shape), winners.reshape(shape)


def spmm_max_backward_triton(grad: Tensor, winner: Tensor, weight: Tensor | None, back: PackedCSR) -> Tensor:
    """Gradient to x ``[..., M, F]``: every source collects from the destinations its edges won."""
    work = back.work
    grad_T, winner_T = flatten_tasks(grad, 2), flatten_tasks(winner, 2)
    tasks, N, F = grad_T.shape
    M = back.num_rows
    grad_x = grad.new_empty(tasks, M, F)
    if grad_x.numel():
        lanes, block = _tile(F)
        partials = work.hub_of_partial.numel()
        part = grad.new_empty(tasks, max(partials, 1), F, dtype=accumulate_dtype(grad.dtype))
        num_heavy, num_light = work.heavy_row.numel(), work.light_row.numel()
        _backward_kernel[(num_heavy + -(-num_light // lanes), -(-F // block), tasks)](
            grad_T, winner_T, grad_T if weight is None else weight.contiguous(), back.indices, back.perm,
            work.heavy_start, work.heavy_len, work.heavy_row, work.light_start, work.light_len, work.light_row,
            grad_x, part, num_heavy, num_light, partials, M, N,
            F=F, HAS_W=weight is not None, ACC=triton_acc(grad.dtype), L=lanes, BF=block, num_warps=4,
        )  # fmt: skip
        if partials:
            add_hub_parts(part, work, grad_x, M)
    return grad_x.reshape(*grad.shape[:-2], M, F)


def spmm_max_torch(x: Tensor, weight: Tensor | None, csr: PackedCSR) -> tuple[Tensor, Tensor]:
    """Reference: ``(out [..., N, F], winner [..., N, F])``; winner is an edge, or -1."""
    rows = csr.rows()
    messages = x.index_select(-2, csr.indices.long())
    if weight is not None:
        messages = messages * weight[:, None].to(x.dtype)
    shape = (*x.shape[:-2], csr.num_rows, x.shape[-1])
    top = scatter_extreme(messages.new_full(shape, -torch.inf), rows, messages, "amax")
    edge = torch.arange(csr.num_edges, device=x.device)[:, None].expand(messages.shape[-2:])
    none = csr.num_edges
    hit = (messages == top.index_select(-2, rows)) | messages.isnan()  # the maximum of a row with NaN is NaN
    candidate = torch.where(hit, edge, none)
    winner = torch.full(shape, none, dtype=torch.int64, device=x.device)
    winner = scatter_extreme(winner, rows, candidate, "amin")
    winner = torch.where(winner == none, -1, winner)
    return torch.where(winner < 0, 0.0, top).to(x.dtype), winner.to(csr.indptr.dtype)


def spmm_max_backward_torch(
    grad: Tensor, winner: Tensor, weight: Tensor | None, csr: PackedCSR, num_cols: int
) -> Tensor:
    """Reference: send every gradient to the source of its winning edge."""
    edge = winner.long().clamp(min=0)
    value = torch.where(winner < 0, 0.0, grad.to(accumulate_dtype(grad.dtype)))
    if csr.num_edges == 0:
        return grad.new_zeros(*grad.shape[:-2], num_cols, grad.shape[-1])
    if weight is not None:
        value = value * weight[edge]
    out = value.new_zeros(*grad.shape[:-2], num_cols, grad.shape[-1])
    return out.scatter_add(-2, csr.indices.long()[edge], value).to(grad.dtype)


@custom_op("weft::spmm_max", "(Tensor x, Tensor? weight, Tensor[] csr, Tensor[] back) -> (Tensor, Tensor)")
def _spmm_max_op(x, weight, csr, back):
    serve = spmm_max_triton if use_triton(x) else cpu.spmm_max if cpu.serves(x, weight) else spmm_max_torch
    return serve(x, weight, unpack_csr(csr))


@custom_op(
    "weft::spmm_max_backward", "(Tensor grad, Tensor winner, Tensor? weight, Tensor[] csr, Tensor[] back) -> Tensor"
)
def _spmm_max_backward_op(grad, winner, weight, csr, back):
    if use_triton(grad):
        return spmm_max_backward_triton(grad, winner, weight, unpack_csr(back))
    serve = cpu.spmm_max_backward if cpu.serves(grad, weight) else spmm_max_backward_torch
    return serve(grad, winner, weight, unpack_csr(csr), unpack_csr(back).num_rows)


@_spmm_max_op.register_fake
def _fake(x, weight, csr, back):
    out = x.new_empty(*x.shape[:-2], csr[0].shape[0] - 1, x.shape[-1])
    return out, torch.empty_like(out, dtype=csr[0].dtype)


@_spmm_max_backward_op.register_fake
def _backward_fake(grad, winner, weight, csr, back):
    return grad.new_empty(*grad.shape[:-2], back[0].shape[0] - 1, grad.shape[-1])


def _setup(ctx, inputs, output):
    _, weight, ctx.csr, ctx.back = inputs
    ctx.save_for_backward(output[1], weight)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # else autograd materialises zeros for outputs without gradients


def _backward(ctx, grad, _):
    winner, weight = ctx.saved_tensors
    grad_x = None if grad is None else _spmm_max_backward_op(grad.contiguous(), winner, weight, ctx.csr, ctx.back)
    return grad_x, None, [None] * len(ctx.csr), [None] * len(ctx.back)


_spmm_max_op.register_autograd(_backward, setup_context=_setup)
batch_tasks(_spmm_max_op, shared=(1,))
batch_tasks(_spmm_max_backward_op, shared=(2,))


@supplied_by_adjacency
def spmm_max(adj: Adjacency, x: Tensor) -> Tensor:
    """Maximum over the in-edges of ``adj.weight * x [..., M, F]``: ``[..., N, F]``, differentiable in x."""
    return _spmm_max_op(x, adj.weight, pack_csr(adj), pack_csr_backward(adj))[0]
