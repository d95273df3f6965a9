"""sharded_spmm: sum neighbours' rows, some of which lie in the memory of peers (or of the host), in one kernel.

    out[t, i] = row_scale[i] * (sum over local e of w[e] * x[t, j]  +  sum over remote e of w[e] * peer[owner(e)][t, row(e)])

The edges of a row are cut into pieces of at most ``ps``. A program takes pairs of pieces, a local and a remote one: it
issues the reads of the remote rows first, accumulates the local piece while they are on their way, and adds the remote
rows last. Every piece writes a partial row of its own; a second kernel adds the partial rows of each row in their
order. So nothing is atomic, and a run has the same bits as the next.

Peers are read through a table of base addresses: memory opened by CUDA IPC, symmetric memory, or pinned host memory.
Nobody may write there meanwhile; the caller's barriers see to that.

Five schedules. Two read a remote row once per edge, as the paper does:

- ``interleaved``: pairs of pieces, as above.
- ``apart``: all local pieces by one launch, all remote ones by the next.

Three read every remote row once, into a staging area, which moves fewer bytes if a remote node has several edges here:

- ``pipelined``: remote rows arrive in chunks, copied by few programs on a stream of their own, while local pieces and
  then the remote pieces of chunks that have arrived are summed.
- ``fetch_interleaved``: a program issues the reads of some remote rows, accumulates local pieces meanwhile, and stores
  the rows to the staging area; a second launch sums remote pieces from there.
- ``fetch_first``: all remote rows are fetched, then local pieces are summed, then remote ones.

Shapes: T tasks, n own rows, h remote rows, F features, L local and R remote edges, P local and Q remote pieces, G peers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.ops.launch.backend import accumulate_dtype, have_triton, next_power_of_2
from weft.ops.launch.launch import triton_acc
from weft.ops.launch.triton_lang import cdiv, jit_any_size, tl, triton

SCHEDULES = ("pipelined", "fetch_interleaved", "interleaved", "fetch_first", "apart")
PER_EDGE = ("interleaved", "apart")  # schedules that read a remote row once per edge
REMOTE_TILE = 4096  # numbers of remote rows that a warp keeps in flight, ps times features: 128 registers per thread
COPY_TILE = 4096  # words of remote rows that a copying program keeps in flight
COPY_PROGRAMS = 264  # that copy at once: few, since a link needs a few MB in flight, and sums need the rest of the GPU
WORD_TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8} if have_triton() else dict[int, Any]()


@dataclass(frozen=True)
class ShardedLaunch:
    """``ps``: neighbours of a piece. ``dist``: pairs of pieces per warp. ``warps``: per program, each with its own.

    ``ps = 0`` leaves rows whole, to compare with; only the schedules that stage all remote rows first can do that.
    """

    ps: int = 16
    dist: int = 2
    warps: int = 4

    def __post_init__(self) -> None:
        for name, least, most in (("ps", 0, 32), ("dist", 1, 16), ("warps", 1, 16)):
            value = getattr(self, name)
            if not least <= value <= most:
                raise InputError(f"sharded_spmm: {name}={value} must be from {least} to {most}")


@dataclass(frozen=True)
class ShardedCSR:
    """The edges of a shard in pieces.

    ``local_ptr [n+1]`` and ``remote_ptr [n+1]``: pieces of every row; ``*_start`` and ``*_length``: edges of a piece.
    ``local_indices [L]``: own rows; ``remote_owner [R]`` and ``remote_row [R]``: whose row, and which;
    ``remote_place [R]``: the same as a place among the distinct remote rows ``halo_owner [h]``, ``halo_row [h]``.
    ``local_weight [L]`` and ``remote_weight [R]``: factors of the edges (None: 1).
    Remote rows may be in several chunks: chunk k has the places ``chunk_rows[k]`` to ``chunk_rows[k + 1]``, no piece
    reaches over two, and ``remote_order [Q]`` lists the pieces by chunk, ``chunk_pieces[k]`` to ``chunk_pieces[k + 1]``.
    """

    local_ptr: Tensor
    local_start: Tensor
    local_length: Tensor
    local_indices: Tensor
    remote_ptr: Tensor
    remote_start: Tensor
    remote_length: Tensor
    remote_owner: Tensor
    remote_row: Tensor
    remote_place: Tensor
    halo_owner: Tensor
    halo_row: Tensor
    ps: int
    remote_order: Tensor
    chunk_pieces: tuple[int, ...]
    chunk_rows: tuple[int, ...]
    local_weight: Tensor | None = None
    remote_weight: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Own rows n."""
        return self.local_ptr.numel() - 1


def sharded_spmm_torch(x: Tensor, peers: Sequence[Tensor], csr: ShardedCSR, row_scale: Tensor | None = None) -> Tensor:
    """Reference: gather every edge's row from where it lies; ``x [..., n, F]``, ``peers[g] [..., n_g, F]``."""
    acc = accumulate_dtype(x.dtype)
    out = x.new_zeros(*x.shape[:-2], csr.num_rows, x.shape[-1], dtype=acc)
    messages = x.index_select(-2, csr.local_indices.long()).to(acc)
    if csr.local_weight is not None:
        messages = messages * csr.local_weight[:, None]
    out = out.index_add(-2, _edge_rows(csr.local_ptr, csr.local_length), messages)
    rows = _edge_rows(csr.remote_ptr, csr.remote_length)
    for owner, peer in enumerate(peers):
        mine = (csr.remote_owner == owner).nonzero().squeeze(1)
        if mine.numel():
            messages = peer.to(x.device).index_select(-2, csr.remote_row[mine].long()).to(acc)
            if csr.remote_weight is not None:
                messages = messages * csr.remote_weight[mine, None]
            out = out.index_add(-2, rows[mine], messages)
    return (out if row_scale is None else out * row_scale[:, None]).to(x.dtype)


def _edge_rows(ptr: Tensor, length: Tensor) -> Tensor:
    """The row of every edge, from the pieces of rows and the edges of pieces."""
    rows = torch.arange(ptr.numel() - 1, device=ptr.device)
    return torch.repeat_interleave(torch.repeat_interleave(rows, ptr.diff().long()), length.long())


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
def _near_kernel(
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
def _pairs_kernel(
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


@jit_any_size("num_local", "num_halo", "num_slots", "N")
def _fetch_kernel(
    x, local_start, local_length, local_indices, local_weight,
    table, counts, halo_owner, halo_row, staging, partial, num_local, num_halo, num_slots, N,
    F: tl.constexpr, HAS_W: tl.constexpr, ACC: tl.constexpr,
    W: tl.constexpr, DIST: tl.constexpr, PS: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """DIST times W local pieces and W PS remote rows, which are copied to ``staging``."""
    task = tl.program_id(2).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    in_f = f < F
    x += task * N * F
    partial += task * num_slots * F
    staging += task * num_halo * F
    for step in range(DIST):
        unit = (tl.program_id(0) * DIST + step) * W
        place_r = unit * PS + tl.arange(0, W * PS)
        far = place_r < num_halo
        owner = tl.load(halo_owner + place_r, mask=far, other=0)
        row_r = tl.load(halo_row + place_r, mask=far, other=0).to(tl.int64)
        base = tl.load(table + owner, mask=far, other=0)
        row_r += task * tl.load(counts + owner, mask=far, other=0)
        address = base.to(tl.pointer_type(x.dtype.element_ty), bitcast=True)
        remote = tl.load(
            address[:, None] + row_r[:, None] * F + f[None, :], mask=far[:, None] & in_f[None, :], other=0.0
        )
        piece = unit + tl.arange(0, W)
        near = piece < num_local
        start = tl.load(local_start + piece, mask=near, other=0)
        length = tl.load(local_length + piece, mask=near, other=0)
        total = _sum_pieces(x, local_indices, local_weight, start, length, f, in_f, F, HAS_W, ACC, W, PS, BF)
        tl.store(partial + piece.to(tl.int64)[:, None] * F + f[None, :], total, mask=near[:, None] & in_f[None, :])
        tl.store(staging + place_r.to(tl.int64)[:, None] * F + f[None, :], remote, mask=far[:, None] & in_f[None, :])


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


@jit_any_size("num_local", "num_remote", "N")
def _add_pieces_kernel(
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


def address_table(peers: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """``(addresses [G], rows [G])`` int64 of peers' matrices ``[..., n_g, F]``, which have to be contiguous."""
    if not all(peer.is_contiguous() for peer in peers):
        raise InputError("sharded_spmm: peers' rows must be contiguous, since they are read by address")
    addresses = torch.tensor([peer.data_ptr() for peer in peers], dtype=torch.int64)
    rows = torch.tensor([peer.shape[-2] for peer in peers], dtype=torch.int64)
    return addresses.to(device), rows.to(device)


@cache
def _copying_stream(index: int) -> torch.cuda.Stream:
    """One per device; its few programs go before those that wait for a place on the device."""
    return torch.cuda.Stream(index, priority=-1)


class _Call:
    """One aggregation: its sizes, the memory that it works in, and its launches."""

    def __init__(self, x: Tensor, table: Tensor, counts: Tensor, csr: ShardedCSR, launch: ShardedLaunch) -> None:
        self.x, self.table, self.counts, self.csr, self.launch = x, table, counts, csr, launch
        self.tasks, self.own, self.features = x.shape
        self.num_local, self.num_remote = csr.local_start.numel(), csr.remote_start.numel()
        self.num_halo = csr.halo_row.numel()
        self.acc, self.weighted = triton_acc(x.dtype), csr.local_weight is not None
        self.warps, self.ps = next_power_of_2(launch.warps), next_power_of_2(csr.ps) if csr.ps else 0

    def _sizes(self, most: int = 128) -> tuple[int, dict[str, Any]]:
        """Tiles of features, and the constants of a launch."""
        width = min(next_power_of_2(self.features), most, 128)
        constants = {"F": self.features, "HAS_W": self.weighted, "ACC": self.acc, "W": self.warps, "PS": self.ps}
        constants |= {"DIST": self.launch.dist, "BF": width, "num_warps": min(self.warps, 16)}
        return cdiv(self.features, width), constants

    def _local(self) -> tuple[Tensor, ...]:
        csr = self.csr
        return (
            self.x,
            csr.local_start,
            csr.local_length,
            csr.local_indices,
            csr.local_weight if self.weighted else self.x,
        )

    def sum_local(self, partial: Tensor) -> None:
        """All local pieces."""
        if self.num_local:
            self._near(*self._local(), self.csr.remote_order, partial, (0, self.num_local), 0, self.own, False)

    def sum_staged(self, staging: Tensor, partial: Tensor, chunk: int | None = None) -> None:
        """Remote pieces from the staging area: all of them, or those of one chunk."""
        csr, ends = self.csr, (0, self.num_remote)
        if chunk is not None:
            ends = (csr.chunk_pieces[chunk], csr.chunk_pieces[chunk + 1])
        weight = csr.remote_weight if self.weighted else self.x
        if ends[1] > ends[0]:
            self._near(
                staging, csr.remote_start, csr.remote_length, csr.remote_place, weight, csr.remote_order, partial,
                ends, self.num_local, self.num_halo, chunk is not None,
            )  # fmt: skip

    def _near(
        self, x: Tensor, starts: Tensor, lengths: Tensor, indices: Tensor, weight: Tensor, order: Tensor,
        partial: Tensor, ends: tuple[int, int], offset: int, rows: int, ordered: bool,
    ) -> None:  # fmt: skip
        tiles, constants = self._sizes()
        constants["W"] *= max(1, 64 // constants["BF"])  # narrow rows: several pieces per warp, no idle lanes
        grid = (cdiv(ends[1] - ends[0], constants["W"] * self.launch.dist), tiles, self.tasks)
        _near_kernel[grid](
            x, starts, lengths, indices, weight, order, partial, *ends, offset, self.num_local + self.num_remote, rows,
            ORDERED=ordered, **constants,
        )  # fmt: skip

    def sum_pairs(self, partial: Tensor, with_local: bool) -> None:
        """Remote pieces, read where they lie, with as many local ones beside them or alone."""
        csr, pairs = self.csr, max(self.num_remote, self.num_local if with_local else 0)
        if pairs:
            tiles, constants = self._sizes(max(16, REMOTE_TILE // self.ps))
            _pairs_kernel[cdiv(pairs, self.warps * self.launch.dist), tiles, self.tasks](
                *self._local(), self.table, self.counts, csr.remote_start, csr.remote_length, csr.remote_owner,
                csr.remote_row, csr.remote_weight if self.weighted else self.x,
                partial, self.num_local, self.num_remote, self.own, HAS_LOCAL=with_local, **constants,
            )  # fmt: skip

    def fetch_beside_local(self, staging: Tensor, partial: Tensor) -> None:
        """Remote rows to the staging area, and local pieces while they are on their way."""
        units = max(cdiv(self.num_halo, self.ps), self.num_local)
        if units:
            tiles, constants = self._sizes(max(16, REMOTE_TILE // self.ps))
            _fetch_kernel[cdiv(units, self.warps * self.launch.dist), tiles, self.tasks](
                *self._local(), self.table, self.counts, self.csr.halo_owner, self.csr.halo_row, staging, partial,
                self.num_local, self.num_halo, self.num_local + self.num_remote, self.own, **constants,
            )  # fmt: skip

    def copy_rows(self, staging: Tensor, first: int, last: int) -> None:
        """Remote rows ``first`` to ``last`` to the staging area."""
        if first >= last:
            return
        row_bytes = self.features * self.x.element_size()
        size = next(size for size in WORDS if row_bytes % size == 0)
        words = row_bytes // size
        block = min(next_power_of_2(words), 512)
        rows = max(1, COPY_TILE // block)
        programs = min(COPY_PROGRAMS, cdiv(last - first, rows))
        _copy_rows_kernel[programs, self.tasks](
            self.table, self.counts, self.csr.halo_owner, self.csr.halo_row, staging.view(WORD_TYPES[size]),
            first, last, self.num_halo, WORD=WORDS[size], WORDS=words, ROWS=rows, BLOCK=block, PROGRAMS=programs,
            num_warps=4,
        )  # fmt: skip

    def pipeline(self, staging: Tensor, partial: Tensor) -> None:
        """Chunks of remote rows on a stream of their own; local pieces, and remote ones of chunks that are there."""
        rows, here = self.csr.chunk_rows, None
        arrived: list[Any] = []
        beside: Any = nullcontext()
        if self.x.is_cuda:
            here, side = torch.cuda.current_stream(self.x.device), _copying_stream(self.x.device.index or 0)
            side.wait_stream(here)
            beside = torch.cuda.stream(side)
        with beside:
            for first, last in itertools.pairwise(rows):
                self.copy_rows(staging, first, last)
                arrived += [] if here is None else [side.record_event()]
        self.sum_local(partial)
        for chunk in range(len(rows) - 1):
            if here is not None:
                here.wait_event(arrived[chunk])
            self.sum_staged(staging, partial, chunk)

    def add(self, partial: Tensor, row_scale: Tensor | None, out: Tensor) -> None:
        """The rows of ``out`` from their partial rows."""
        csr, width = self.csr, min(next_power_of_2(self.features), 128)
        _add_pieces_kernel[cdiv(csr.num_rows, 16), cdiv(self.features, width), self.tasks](
            partial, csr.local_ptr, csr.remote_ptr, row_scale if row_scale is not None else self.x, out,
            self.num_local, self.num_remote, csr.num_rows,
            F=self.features, HAS_RS=row_scale is not None, ACC=self.acc, BR=16, BF=width, num_warps=4,
        )  # fmt: skip


def sharded_spmm_triton(
    x: Tensor,
    table: Tensor,
    counts: Tensor,
    csr: ShardedCSR,
    row_scale: Tensor | None = None,
    launch: ShardedLaunch | None = None,
    schedule: str = SCHEDULES[0],
    scratch: Tensor | None = None,
    staging: Tensor | None = None,
) -> Tensor:
    """Launch the kernels over ``x [..., n, F]`` and the peers in ``table`` and ``counts`` (:func:`address_table`).

    ``scratch``: memory for the partial rows, at least T (P + Q) F numbers; ``staging``: for remote rows, at least T h F
    numbers of the type of ``x``. Whatever is read of them is written before.
    """
    launch = launch or ShardedLaunch(ps=csr.ps)
    if schedule not in SCHEDULES:
        raise InputError(f"sharded_spmm: schedule={schedule!r} must be one of {', '.join(SCHEDULES)}")
    if launch.ps != csr.ps:
        raise InputError(f"sharded_spmm: the csr has pieces of {csr.ps}, the launch was made for ps={launch.ps}")
    if launch.ps == 0 and schedule not in ("pipelined", "fetch_first"):
        raise InputError(f"sharded_spmm: ps=0 leaves rows whole, which schedule={schedule!r} cannot do")
    lead, num_features = x.shape[:-2], x.shape[-1]
    x_TNF = x.reshape(lead.numel(), *x.shape[-2:]).contiguous()
    out = x.new_empty(lead.numel(), csr.num_rows, num_features)
    if out.numel():
        call = _Call(x_TNF, table, counts, csr, launch)
        size = call.tasks * (call.num_local + call.num_remote) * num_features
        partial = x.new_empty(max(size, 1), dtype=accumulate_dtype(x.dtype)) if scratch is None else scratch
        _sum_all(call, schedule, partial, staging)
        call.add(partial, row_scale, out)
    return out.reshape(*lead, csr.num_rows, num_features)


def _sum_all(call: _Call, schedule: str, partial: Tensor, staging: Tensor | None) -> None:
    """Every piece, into its partial row."""
    if schedule in PER_EDGE:
        if schedule == "apart":
            call.sum_local(partial)
        call.sum_pairs(partial, with_local=schedule == "interleaved")
        return
    shape = (call.tasks, call.num_halo, call.features)
    rows = call.x.new_empty(shape) if staging is None else staging[: math.prod(shape)].view(shape)
    if schedule == "pipelined":
        call.pipeline(rows, partial)
        return
    if schedule == "fetch_first":
        call.copy_rows(rows, 0, call.num_halo)
        call.sum_local(partial)
    else:
        call.fetch_beside_local(rows, partial)
    call.sum_staged(rows, partial)
