"""The parts of ``spmm``, ``spmm_max`` and their gradients in a shared launch, and the kernel that pushes along edges."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.ops.backend import accumulate_dtype, next_power_of_2
from weft.ops.lanes_triton import add_hub_parts_piece
from weft.ops.lang import tl, triton
from weft.ops.launch import flatten_tasks, triton_acc
from weft.ops.multi_launch import Part, launch_parts
from weft.ops.spmm_max_triton import _tile, max_backward_piece, max_hub_piece, max_piece
from weft.ops.spmm_triton import SpmmLaunch, add_partials_piece, choose_launch, spmm_piece
from weft.ops.walk import Walk, unpack

Made = tuple[tuple[Tensor, ...], list[Part]]


def spmm_parts(
    x, weight, row_scale, col_scale, walk, back=(), weight_back=None, launch: SpmmLaunch | None = None
) -> Made:
    """``((out [..., N, F],), parts)`` of a sum over ``x [..., M, F]``."""
    walk = unpack(walk)
    x_TMF = flatten_tasks(x, 2)
    tasks, M, F = x_TMF.shape
    N = walk.num_rows
    out = x.new_empty(tasks, N, F)
    shaped = (out.reshape(*x.shape[:-2], N, F),)
    if out.numel() == 0:
        return shaped, []
    launch = launch or choose_launch(M, F, x.element_size(), walk.num_edges / max(N, 1))
    weight, stride_w = _weight_of(weight, x, walk)
    partials = walk.work.hub_of_partial.numel()
    partial = x.new_empty(tasks, max(partials, 1), F, dtype=accumulate_dtype(x.dtype))
    tiles = -(-F // launch.block_features)
    constants = {
        "F": F, "HAS_W": weight is not None, "HAS_RS": row_scale is not None, "HAS_CS": col_scale is not None,
        "ACC": triton_acc(x.dtype), "BR": launch.block_rows, "BE": launch.block_edges, "BF": launch.block_features,
        "UNROLL": launch.unroll,
    }  # fmt: skip
    given = (x_TMF, *(x_TMF if value is None else value for value in (weight, row_scale, col_scale)))
    arguments = (*given, *_pieces(walk), out, partial, *_sizes(walk), M, N, stride_w)
    parts = [
        Part(spmm_piece, _grid(walk, launch.block_rows, tiles, tasks), arguments, _fixed(constants), launch.num_warps)
    ]
    if partials:
        constants = {
            "F": F,
            "HAS_RS": row_scale is not None,
            "ACC": triton_acc(x.dtype),
            "BP": 16,
            "BF": launch.block_features,
        }
        arguments = (partial, walk.work.hub_ptr, walk.work.hub_row, given[2], out, partials, N)
        parts.append(Part(add_partials_piece, (walk.work.hub_row.numel(), tiles, tasks), arguments, _fixed(constants)))
    return shaped, parts


def max_parts(x, weight, walk, back=()) -> Made:
    """``((out [..., N, F], winner [..., N, F]), parts)`` of a maximum over ``x [..., M, F]``."""
    walk = unpack(walk)
    x_TMF = flatten_tasks(x, 2)
    tasks, M, F = x_TMF.shape
    N = walk.num_rows
    out = x.new_empty(tasks, N, F)
    winners = torch.empty_like(out, dtype=walk.indptr.dtype)
    shape = (*x.shape[:-2], N, F)
    shaped = out.reshape(shape), winners.reshape(shape)
    if out.numel() == 0:
        return shaped, []
    lanes, block = _tile(F)
    partials = walk.work.hub_of_partial.numel()
    part = x.new_empty(tasks, max(partials, 1), F, dtype=accumulate_dtype(x.dtype))
    part_winner = torch.empty_like(part, dtype=torch.int64)
    constants = {"F": F, "HAS_W": weight is not None, "ACC": triton_acc(x.dtype), "L": lanes, "BF": block}
    given = (x_TMF, x_TMF if weight is None else weight.contiguous())
    arguments = (*given, *_pieces(walk), out, winners, part, part_winner, *_sizes(walk), M, N)
    tiles = -(-F // block)
    parts = [Part(max_piece, _grid(walk, lanes, tiles, tasks), arguments, _fixed(constants))]
    if partials:
        del constants["HAS_W"]
        work = walk.work
        arguments = (part, part_winner, work.hub_ptr, work.hub_row, out, winners, partials, N)
        parts.append(Part(max_hub_piece, (work.hub_row.numel(), tiles, tasks), arguments, _fixed(constants)))
    return shaped, parts


def max_backward_parts(grad, winner, weight, walk, back) -> Made:
    """``((grad_x [..., M, F],), parts)``: every source collects from the destinations its edges won."""
    back = unpack(back)
    grad_TNF, winner_TNF = flatten_tasks(grad, 2), flatten_tasks(winner, 2)
    tasks, N, F = grad_TNF.shape
    M = back.num_rows
    grad_x = grad.new_empty(tasks, M, F)
    shaped = (grad_x.reshape(*grad.shape[:-2], M, F),)
    if grad_x.numel() == 0:
        return shaped, []
    lanes, block = _tile(F)
    partials = back.work.hub_of_partial.numel()
    part = grad.new_empty(tasks, max(partials, 1), F, dtype=accumulate_dtype(grad.dtype))
    constants = {"F": F, "HAS_W": weight is not None, "ACC": triton_acc(grad.dtype), "L": lanes, "BF": block}
    indices, *pieces = _pieces(back)
    given = (grad_TNF, winner_TNF, grad_TNF if weight is None else weight.contiguous(), indices, back.perm)
    arguments = (*given, *pieces, grad_x, part, *_sizes(back), M, N)
    parts = [Part(max_backward_piece, _grid(back, lanes, -(-F // block), tasks), arguments, _fixed(constants))]
    if partials:
        parts.append(_add_parts(part, back, grad_x, M, F))
    return shaped, parts


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
def push_piece(
    piece, tile, task, x, w, row_scale, col_scale, indices,
    heavy_start, heavy_len, heavy_row, light_start, light_len, light_row, hub_row, hub_of_partial,
    out, num_heavy, num_light, num_partial, M, N, stride_w,
    F: tl.constexpr, HAS_W: tl.constexpr, HAS_RS: tl.constexpr, HAS_CS: tl.constexpr, ACC: tl.constexpr,
    BR: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """One piece of the work list: its rows (of N) are sent along their edges to the columns (of M)."""
    f = tile * BF + tl.arange(0, BF)
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


def push_parts(x, weight, row_scale, col_scale, walk, num_cols) -> Made:
    """``((out [..., M, F],), parts)`` of the transpose's product with ``x [..., N, F]``, sent along the rows' edges.

    The result is added up atomically, in the accumulation type, and so it is for a caller to round.
    """
    walk = unpack(walk)
    x_TNF = flatten_tasks(x, 2)
    tasks, N, F = x_TNF.shape
    out = x.new_zeros(tasks, num_cols, F, dtype=accumulate_dtype(x.dtype))
    shaped = (out.reshape(*x.shape[:-2], num_cols, F),)
    if out.numel() == 0 or N == 0:
        return shaped, []
    launch = choose_launch(num_cols, F, x.element_size(), walk.num_edges / max(N, 1))
    weight, stride_w = _weight_of(weight, x, walk)
    constants = {
        "F": F, "HAS_W": weight is not None, "HAS_RS": row_scale is not None, "HAS_CS": col_scale is not None,
        "ACC": triton_acc(x.dtype), "BR": launch.block_rows, "BE": launch.block_edges, "BF": launch.block_features,
    }  # fmt: skip
    given = (x_TNF, *(x_TNF if value is None else value for value in (weight, row_scale, col_scale)))
    hubs = walk.work.hub_row, walk.work.hub_of_partial
    arguments = (*given, *_pieces(walk), *hubs, out, *_sizes(walk), num_cols, N, stride_w)
    grid = _grid(walk, launch.block_rows, -(-F // launch.block_features), tasks)
    return shaped, [Part(push_piece, grid, arguments, _fixed(constants), launch.num_warps)]


def push_triton(x, weight, row_scale, col_scale, walk, num_cols) -> Tensor:
    """The push on its own."""
    (out,), parts = push_parts(x, weight, row_scale, col_scale, walk, num_cols)
    launch_parts(parts)
    return out


def _weight_of(weight: Tensor | None, x: Tensor, walk: Walk) -> tuple[Tensor | None, int]:
    """The weights, contiguous, and how many elements one task's are from the next one's (0: shared)."""
    if weight is None or weight.dim() == 1:
        return None if weight is None else weight.contiguous(), 0
    return weight.expand(*x.shape[:-2], walk.num_edges).contiguous(), walk.num_edges


def _pieces(walk: Walk) -> tuple[Tensor, ...]:
    work = walk.work
    heavy = work.heavy_start, work.heavy_len, work.heavy_row
    return walk.indices, *heavy, work.light_start, work.light_len, work.light_row


def _sizes(walk: Walk) -> tuple[int, int, int]:
    """How many heavy pieces, light rows and chunks of hubs there are."""
    work = walk.work
    return work.heavy_row.numel(), work.light_row.numel(), work.hub_of_partial.numel()


def _grid(walk: Walk, rows: int, tiles: int, tasks: int) -> tuple[int, int, int]:
    heavy, light, _ = _sizes(walk)
    return heavy + -(-light // rows), tiles, tasks


def _fixed(constants: dict) -> Sequence:
    return tuple(constants.items())


def _add_parts(part: Tensor, walk: Walk, out: Tensor, num_rows: int, spacing: int) -> Part:
    """The sums over the chunks ``[T, P, F]`` of hubs."""
    tasks, partials, F = part.shape
    block = min(128, next_power_of_2(F))
    constants = {"F": F, "ROW": spacing, "ACC": triton_acc(part.dtype), "L": 16, "BF": block}
    arguments = (part, walk.work.hub_ptr, walk.work.hub_row, out, partials, num_rows)
    grid = (walk.work.hub_row.numel(), -(-F // block), tasks)
    return Part(add_hub_parts_piece, grid, arguments, _fixed(constants))
