"""sharded_spmm: sum neighbours' rows, some of which lie in the memory of peers (or of the host), piece by piece.

The edges of a row are cut into pieces of at most ``ps``. A program takes pairs of pieces, a local and a remote one: it
issues the reads of the remote rows first, accumulates the local piece while they are on their way, and adds the remote
rows last. Every piece writes a partial row of its own; a second kernel adds the partial rows of each row in their
order. So nothing is atomic, and a run has the same bits as the next.

Peers are read through a table of base addresses: memory opened by CUDA IPC, symmetric memory, or pinned host memory.
No rank may write there meanwhile; the caller's barriers ensure that.

Four schedules, of which ``apart`` and ``fetch_first`` are for comparison: the other two without their overlap. Two
read a remote row once per edge, as the paper does:

- ``interleaved``: pairs of pieces, as above.
- ``apart``: all local pieces by one launch, all remote ones by the next.

Two read every remote row once, into a staging area, which moves fewer bytes if a remote node has several edges here:

- ``pipelined``: remote rows arrive in chunks, copied by few programs on a stream of their own, while local pieces and
  then the remote pieces of chunks that have arrived are summed.
- ``fetch_first``: all remote rows are fetched, then local pieces are summed, then remote ones.

Shapes: T tasks, n own rows, h remote rows, F features, P local and Q remote pieces, G peers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.core.settings import SHARDED_KERNELS
from weft.ops.launch.backend import accumulate_dtype, next_power_of_2
from weft.ops.launch.triton_lang import cdiv, triton_acc
from weft.ops.sharded.pieces_triton import (
    add_pieces_kernel,
    copy_rows_triton,
    copying_stream,
    near_kernel,
    pairs_kernel,
)

# ---- The edges of a shard in pieces, how its kernels are launched, and the reference of their sum
#     out[t, i] = row_scale[i] * (sum over local e of w[e] * x[t, j]
#                                 + sum over remote e of w[e] * peer[owner(e)][t, row(e)])


@dataclass(frozen=True)
class ShardedLaunch:
    """``ps``: neighbours of a piece. ``dist``: pairs of pieces per warp. ``warps``: per program, each with its own.

    ``ps = 0`` leaves rows whole, to compare with; only the schedules that stage all remote rows first can do that.
    ``way``: one of :mod:`weft.core.settings`. ``"staged"`` is the schedule ``pipelined``, ``"interleaved"`` the one of
    that name; to the others the numbers are of no matter: ``"tiles"`` are :mod:`weft.ops.sharded.streamed_spmm`,
    ``"fetched"`` sums in the order of the whole matrix.
    """

    ps: int = 16
    dist: int = 2
    warps: int = 4
    way: str = "staged"

    def __post_init__(self) -> None:
        if self.way not in SHARDED_KERNELS:
            raise InputError(f"sharded_spmm: way={self.way!r} must be one of {', '.join(SHARDED_KERNELS)}")
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
    reaches over two, and ``remote_order [Q]`` lists the pieces by chunk: ``chunk_pieces[k]`` to
    ``chunk_pieces[k + 1]``.
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


def address_table(peers: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """``(addresses [G], rows [G])`` int64 of peers' matrices ``[..., n_g, F]``, which have to be contiguous."""
    if not all(peer.is_contiguous() for peer in peers):
        raise InputError("sharded_spmm: peers' rows must be contiguous, since they are read by address")
    addresses = torch.tensor([peer.data_ptr() for peer in peers], dtype=torch.int64)
    rows = torch.tensor([peer.shape[-2] for peer in peers], dtype=torch.int64)
    return addresses.to(device), rows.to(device)


# ---- Tiles of remote rows: how large each is
#
# While a tile crosses the link, local edges and the tiles before it are summed. The last tile has nothing to hide
# behind, so tiles shrink: their shares fall evenly, to 2 / (k (k + 1)) of the rows.

MOST_TILES = 6
TILE_ROWS = 1 << 17  # of a tile on average, at least: below, a launch more costs more than it hides


def tile_shares(count: int) -> list[float]:
    """The shares of ``count`` tiles, the largest first."""
    whole = count * (count + 1) / 2
    return [(count - tile) / whole for tile in range(count)]


def tile_count(rows: int) -> int:
    """Tiles that ``rows`` remote rows are cut into."""
    return max(1, min(MOST_TILES, rows // TILE_ROWS))


def tile_ends(rows: int, count: int) -> list[int]:
    """Where the tiles of ``rows`` rows end."""
    done, ends = 0.0, []
    for share in tile_shares(count):
        done += share
        ends.append(round(rows * done))
    return [*ends[:-1], rows]


SCHEDULES = ("pipelined", "interleaved", "fetch_first", "apart")
PER_EDGE = ("interleaved", "apart")  # schedules that read a remote row once per edge
REMOTE_TILE = 4096  # numbers of remote rows that a warp keeps in flight, ps times features: 128 registers per thread


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
        near_kernel[grid](
            x, starts, lengths, indices, weight, order, partial, *ends, offset, self.num_local + self.num_remote, rows,
            ORDERED=ordered, **constants,
        )  # fmt: skip

    def sum_pairs(self, partial: Tensor, with_local: bool) -> None:
        """Remote pieces, read where they lie, together with as many local ones, or alone."""
        csr, pairs = self.csr, max(self.num_remote, self.num_local if with_local else 0)
        if pairs:
            tiles, constants = self._sizes(max(16, REMOTE_TILE // self.ps))
            pairs_kernel[cdiv(pairs, self.warps * self.launch.dist), tiles, self.tasks](
                *self._local(), self.table, self.counts, csr.remote_start, csr.remote_length, csr.remote_owner,
                csr.remote_row, csr.remote_weight if self.weighted else self.x,
                partial, self.num_local, self.num_remote, self.own, HAS_LOCAL=with_local, **constants,
            )  # fmt: skip

    def copy_rows(self, staging: Tensor, first: int, last: int) -> None:
        """Remote rows ``first`` to ``last`` to the staging area."""
        copy_rows_triton(staging, self.table, self.counts, self.csr.halo_owner, self.csr.halo_row, first, last)

    def pipeline(self, staging: Tensor, partial: Tensor) -> None:
        """Chunks of remote rows on a stream of their own; local pieces, and remote ones of chunks that are there."""
        rows, here = self.csr.chunk_rows, None
        arrived: list[Any] = []
        copying: Any = nullcontext()
        if self.x.is_cuda:
            here, side = torch.cuda.current_stream(self.x.device), copying_stream(self.x.device.index or 0)
            side.wait_stream(here)
            copying = torch.cuda.stream(side)
        with copying:
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
        add_pieces_kernel[cdiv(csr.num_rows, 16), cdiv(self.features, width), self.tasks](
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
        shape = (call.tasks, call.num_halo, num_features)
        if schedule in PER_EDGE:
            if schedule == "apart":
                call.sum_local(partial)
            call.sum_pairs(partial, with_local=schedule == "interleaved")
        else:
            rows = x.new_empty(shape) if staging is None else staging[: math.prod(shape)].view(shape)
            if schedule == "pipelined":
                call.pipeline(rows, partial)
            else:
                call.copy_rows(rows, 0, call.num_halo)
                call.sum_local(partial)
                call.sum_staged(rows, partial)
        call.add(partial, row_scale, out)
    return out.reshape(*lead, csr.num_rows, num_features)
