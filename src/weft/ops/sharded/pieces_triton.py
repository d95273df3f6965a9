"""Kernels that sum pieces of rows: local ones, remote ones where they lie or from a staging area, and pairs of both.

Every piece writes a partial row of its own; a last kernel adds the partial rows of each row in their order. So nothing
is atomic, and a run has the same bits as the next.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from weft.ops.launch.backend import have_triton, next_power_of_2
from weft.ops.launch.triton_lang import cdiv, jit_any_size, tl, triton


@triton.jit
def _edge_rows_of(
    x, indices, weight, start, length, place, f, in_f, F: tl.constexpr, HAS_W: tl.constexpr, ACC: tl.constexpr
):
    """The row of edge ``place`` of every piece, times its factor; zeros if the piece has no such edge."""
    inside = place < length
    column = tl.load(indices + start + place, mask=inside, other=0).to(tl.int64)
    value = tl.load(x + column[:, None] * F + f[None, :], mask=inside[:, None] & in_f[None, :], other=0.0).to(ACC)
    if HAS_W:
        value *= tl.load(weight + start + place, mask=inside, other=0.0).to(ACC)[:, None]
    return value


@triton.jit
def _sum_pieces(
    x, indices, weight, start, length, f, in_f,
    F: tl.constexpr, HAS_W: tl.constexpr, ACC: tl.constexpr, W: tl.constexpr, PS: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """The sums ``[W, BF]`` of W pieces of rows of ``x``, edge after edge; pieces of any length if PS is 0."""
    total = tl.zeros([W, BF], ACC)
    if PS == 0:
        for place in range(tl.max(length, 0)):
            total += _edge_rows_of(x, indices, weight, start, length, place, f, in_f, F, HAS_W, ACC)
    else:
        for place in tl.static_range(PS):
            total += _edge_rows_of(x, indices, weight, start, length, place, f, in_f, F, HAS_W, ACC)
    return total


@jit_any_size("first", "last", "offset", "num_slots", "N")
def near_kernel(
    x, starts, lengths, indices, weight, order, partial, first, last, offset, num_slots, N,
    F: tl.constexpr, HAS_W: tl.constexpr, ORDERED: tl.constexpr, ACC: tl.constexpr,
    W: tl.constexpr, DIST: tl.constexpr, PS: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Pieces ``first`` to ``last`` (of ``order``, if ORDERED) of rows in the device's memory, DIST times W per program."""
    task = tl.program_id(2).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    in_f = f < F
    x += task * N * F
    partial += (task * num_slots + offset) * F
    for step in range(DIST):
        place = first + (tl.program_id(0) * DIST + step) * W + tl.arange(0, W)
        there = place < last
        piece = tl.load(order + place, mask=there, other=0) if ORDERED else place
        start = tl.load(starts + piece, mask=there, other=0)
        length = tl.load(lengths + piece, mask=there, other=0)
        total = _sum_pieces(x, indices, weight, start, length, f, in_f, F, HAS_W, ACC, W, PS, BF)
        tl.store(partial + piece.to(tl.int64)[:, None] * F + f[None, :], total, mask=there[:, None] & in_f[None, :])


@jit_any_size("num_local", "num_remote", "N")
def pairs_kernel(
    x, local_start, local_length, local_indices, local_weight,
    table, counts, remote_start, remote_length, remote_owner, remote_row, remote_weight,
    partial, num_local, num_remote, N,
    F: tl.constexpr, HAS_W: tl.constexpr, ACC: tl.constexpr, HAS_LOCAL: tl.constexpr,
    W: tl.constexpr, DIST: tl.constexpr, PS: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """DIST times W pairs of a local and a remote piece; without HAS_LOCAL the remote pieces alone."""
    task = tl.program_id(2).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    in_f = f < F
    x += task * N * F
    partial += task * (num_local + num_remote) * F
    slot = tl.arange(0, PS)
    for step in range(DIST):
        piece = (tl.program_id(0) * DIST + step) * W + tl.arange(0, W)
        # All rows of the remote piece at once: nothing uses them before the local piece is done.
        far = piece < num_remote
        start_r = tl.load(remote_start + piece, mask=far, other=0)
        length_r = tl.load(remote_length + piece, mask=far, other=0)
        there = slot[None, :] < length_r[:, None]
        edge_r = start_r[:, None] + slot[None, :]
        owner = tl.load(remote_owner + edge_r, mask=there, other=0)
        row_r = tl.load(remote_row + edge_r, mask=there, other=0).to(tl.int64)
        base = tl.load(table + owner, mask=there, other=0)
        row_r += task * tl.load(counts + owner, mask=there, other=0)
        address = base.to(tl.pointer_type(x.dtype.element_ty), bitcast=True)
        remote = tl.load(
            address[:, :, None] + row_r[:, :, None] * F + f[None, None, :],
            mask=there[:, :, None] & in_f[None, None, :],
            other=0.0,
        )
        if HAS_LOCAL:
            near = piece < num_local
            start_l = tl.load(local_start + piece, mask=near, other=0)
            length_l = tl.load(local_length + piece, mask=near, other=0)
            total = _sum_pieces(x, local_indices, local_weight, start_l, length_l, f, in_f, F, HAS_W, ACC, W, PS, BF)
            tl.store(partial + piece.to(tl.int64)[:, None] * F + f[None, :], total, mask=near[:, None] & in_f[None, :])
        arrived = remote.to(ACC)
        if HAS_W:
            factor = tl.load(remote_weight + edge_r, mask=there, other=0.0).to(ACC)
            arrived *= factor[:, :, None]
        place_r = (num_local + piece).to(tl.int64)
        tl.store(partial + place_r[:, None] * F + f[None, :], tl.sum(arrived, 1), mask=far[:, None] & in_f[None, :])


@jit_any_size("num_local", "num_remote", "N")
def add_pieces_kernel(
    partial, local_ptr, remote_ptr, row_scale, out, num_local, num_remote, N,
    F: tl.constexpr, HAS_RS: tl.constexpr, ACC: tl.constexpr, BR: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """BR rows and one tile of features: local partial rows, then remote ones, always in the same order."""
    task = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    valid, in_f = row < N, f < F
    partial += task * (num_local + num_remote) * F
    total = tl.zeros([BR, BF], ACC)
    first = tl.load(local_ptr + row, mask=valid, other=0)
    count = tl.load(local_ptr + row + 1, mask=valid, other=0) - first
    for place in range(tl.max(count, 0)):
        at = partial + (first + place).to(tl.int64)[:, None] * F + f[None, :]
        total += tl.load(at, mask=(place < count)[:, None] & in_f[None, :], other=0.0)
    first = tl.load(remote_ptr + row, mask=valid, other=0)
    count = tl.load(remote_ptr + row + 1, mask=valid, other=0) - first
    for place in range(tl.max(count, 0)):
        at = partial + (num_local + first + place).to(tl.int64)[:, None] * F + f[None, :]
        total += tl.load(at, mask=(place < count)[:, None] & in_f[None, :], other=0.0)
    if HAS_RS:
        total *= tl.load(row_scale + row, mask=valid, other=0.0).to(ACC)[:, None]
    at = out + (task * N + row)[:, None] * F + f[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=valid[:, None] & in_f[None, :])


# ---- Copy remote rows to a staging area, by few programs, so that concurrent sums have the rest of the GPU
#
# Shapes: T tasks, h remote rows, F features, G peers.

COPY_TILE = 4096  # words of remote rows that a copying program keeps in flight
COPY_PROGRAMS = 264  # that copy at once: few, since a link needs a few MB in flight, and sums need the rest of the GPU
WORD_TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8} if have_triton() else dict[int, Any]()


@jit_any_size("first", "last", "num_halo")
def _copy_rows_kernel(
    table, counts, halo_owner, halo_row, staging, first, last, num_halo,
    WORD: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Remote rows ``first`` to ``last`` of one task to ``staging``, ROWS at a time; PROGRAMS take turns."""
    task = tl.program_id(1).to(tl.int64)
    staging += task * num_halo * WORDS
    for tile in range(tl.program_id(0), tl.cdiv(last - first, ROWS), PROGRAMS):
        place = first + tile * ROWS + tl.arange(0, ROWS)
        there = place < last
        owner = tl.load(halo_owner + place, mask=there, other=0)
        row = tl.load(halo_row + place, mask=there, other=0).to(tl.int64)
        base = tl.load(table + owner, mask=there, other=0)
        row += task * tl.load(counts + owner, mask=there, other=0)
        address = base.to(tl.pointer_type(WORD), bitcast=True)
        for begin in tl.static_range(0, WORDS, BLOCK):
            word = begin + tl.arange(0, BLOCK)
            mask = there[:, None] & (word < WORDS)[None, :]
            value = tl.load(address[:, None] + row[:, None] * WORDS + word[None, :], mask=mask, other=0)
            tl.store(staging + place.to(tl.int64)[:, None] * WORDS + word[None, :], value, mask=mask)


def copy_rows_triton(
    staging: Tensor, table: Tensor, counts: Tensor, owner: Tensor, row: Tensor, first: int, last: int
) -> None:
    """Rows ``first`` to ``last`` of ``(owner [h], row [h])`` to the same places of ``staging [T, h, F]``.

    ``table [G]`` and ``counts [G]``: addresses and rows of the peers (:func:`weft.ops.sharded.sharded_spmm.address_table`).
    """
    if first >= last:
        return
    tasks, num_halo, features = staging.shape
    row_bytes = features * staging.element_size()
    size = next(size for size in WORDS if row_bytes % size == 0)
    words = row_bytes // size
    block = min(next_power_of_2(words), 512)
    rows = max(1, COPY_TILE // block)
    programs = min(COPY_PROGRAMS, cdiv(last - first, rows))
    _copy_rows_kernel[programs, tasks](
        table, counts, owner, row, staging.view(WORD_TYPES[size]), first, last, num_halo,
        WORD=WORDS[size], WORDS=words, ROWS=rows, BLOCK=block, PROGRAMS=programs, num_warps=4,
    )  # fmt: skip


@cache
def copying_stream(index: int) -> torch.cuda.Stream:
    """One per device; its few programs go before those that wait for a place on the device."""
    return torch.cuda.Stream(index, priority=-1)
