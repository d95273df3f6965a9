"""Triton kernels of ``spmm_max.py``: maximum with its winning edge, and the gather of its backward."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.csr.packed import PackedCSR
from weft.ops.csr.worklist_triton import heavy_piece, light_rows
from weft.ops.launch.backend import accumulate_dtype, next_power_of_2
from weft.ops.launch.triton_lang import constant, flatten_tasks, tl, triton, triton_acc
from weft.ops.sparse.lanes_triton import add_hub_parts

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
                x,
                w,
                indices,
                start_one + first + lane,
                first + lane < length_one,
                f,
                in_f,
                F,
                best,
                winner,
                HAS_W,
                ACC,
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
            add_hub_parts(part, work, grad_x, M, F)
    return grad_x.reshape(*grad.shape[:-2], M, F)
