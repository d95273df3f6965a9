"""sharded_spmm: sum neighbours' rows, some of which lie in the memory of peers (or of the host), in one kernel.

    out[t, i] = row_scale[i] * (sum over local e of w[e] * x[t, j]  +  sum over remote e of w[e] * peer[owner(e)][t, row(e)])

The edges of a row are cut into pieces of at most ``ps``. A program takes pairs of pieces, a local and a remote one: it
issues the reads of the remote rows first, accumulates the local piece while they are on their way, and adds the remote
rows last. Every piece writes a partial row of its own; a second kernel adds the partial rows of each row in their
order. So nothing is atomic, and a run has the same bits as the next.

Peers are read through a table of base addresses: memory opened by CUDA IPC, symmetric memory, or pinned host memory.
Nobody may write there meanwhile; the caller's barriers see to that.

Four schedules. Two read a remote row once per edge, as the paper does:

- ``interleaved``: pairs of pieces, as above.
- ``apart``: all local pieces by one launch, all remote ones by the next.

Two read every remote row once, into a staging area, which moves fewer bytes where a remote node has several edges here:

- ``fetch_interleaved``: a program issues the reads of some remote rows, accumulates local pieces meanwhile, and stores
  the rows to the staging area; a second launch sums remote pieces from there.
- ``fetch_first``: all remote rows are fetched, then local pieces are summed, then remote ones.

Shapes: T tasks, n own rows, h remote rows, F features, L local and R remote edges, P local and Q remote pieces, G peers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.ops.launch.backend import accumulate_dtype, next_power_of_2
from weft.ops.launch.launch import triton_acc
from weft.ops.launch.triton_lang import cdiv, tl, triton

SCHEDULES = ("fetch_interleaved", "interleaved", "fetch_first", "apart")
BOTH, LOCAL, REMOTE = 0, 1, 2
REMOTE_TILE = 4096  # numbers of remote rows that a warp keeps in flight, ps times features: 128 registers per thread


@dataclass(frozen=True)
class ShardedLaunch:
    """``ps``: neighbours of a piece. ``dist``: pairs of pieces per warp. ``warps``: per program, each with its own."""

    ps: int = 16
    dist: int = 2
    warps: int = 4

    def __post_init__(self) -> None:
        for name, most in (("ps", 32), ("dist", 16), ("warps", 16)):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise InputError(f"sharded_spmm: {name}={value} must be from 1 to {most}")


@dataclass(frozen=True)
class ShardWalk:
    """The edges of a shard in pieces.

    ``local_ptr [n+1]`` and ``remote_ptr [n+1]``: pieces of every row; ``*_start`` and ``*_length``: edges of a piece.
    ``local_indices [L]``: own rows; ``remote_owner [R]`` and ``remote_row [R]``: whose row, and which;
    ``remote_place [R]``: the same as a place among the distinct remote rows ``halo_owner [h]``, ``halo_row [h]``.
    ``local_weight [L]`` and ``remote_weight [R]``: factors of the edges (None: 1).
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
    local_weight: Tensor | None = None
    remote_weight: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Own rows n."""
        return self.local_ptr.numel() - 1


def sharded_spmm_torch(x: Tensor, peers: Sequence[Tensor], walk: ShardWalk, row_scale: Tensor | None = None) -> Tensor:
    """Reference: gather every edge's row from where it lies; ``x [..., n, F]``, ``peers[g] [..., n_g, F]``."""
    acc = accumulate_dtype(x.dtype)
    out = x.new_zeros(*x.shape[:-2], walk.num_rows, x.shape[-1], dtype=acc)
    messages = x.index_select(-2, walk.local_indices.long()).to(acc)
    if walk.local_weight is not None:
        messages = messages * walk.local_weight[:, None]
    out = out.index_add(-2, _edge_rows(walk.local_ptr, walk.local_length), messages)
    rows = _edge_rows(walk.remote_ptr, walk.remote_length)
    for owner, peer in enumerate(peers):
        mine = (walk.remote_owner == owner).nonzero().squeeze(1)
        if mine.numel():
            messages = peer.to(x.device).index_select(-2, walk.remote_row[mine].long()).to(acc)
            if walk.remote_weight is not None:
                messages = messages * walk.remote_weight[mine, None]
            out = out.index_add(-2, rows[mine], messages)
    return (out if row_scale is None else out * row_scale[:, None]).to(x.dtype)


def _edge_rows(ptr: Tensor, length: Tensor) -> Tensor:
    """The row of every edge, from the pieces of rows and the edges of pieces."""
    rows = torch.arange(ptr.numel() - 1, device=ptr.device)
    return torch.repeat_interleave(torch.repeat_interleave(rows, ptr.diff().long()), length.long())


@triton.jit
def _pieces_kernel(
    x, local_start, local_length, local_indices, local_weight,
    table, counts, remote_start, remote_length, remote_owner, remote_row, remote_weight,
    partial, num_local, num_remote, N,
    F: tl.constexpr, HAS_W: tl.constexpr, ACC: tl.constexpr, MODE: tl.constexpr,
    W: tl.constexpr, DIST: tl.constexpr, PS: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """DIST times W pairs of pieces and one tile of features of one task; MODE 1 and 2 take one side alone."""
    task = tl.program_id(2).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    in_f = f < F
    x += task * N * F
    partial += task * (num_local + num_remote) * F
    slot = tl.arange(0, PS)
    for step in range(DIST):
        piece = (tl.program_id(0) * DIST + step) * W + tl.arange(0, W)
        if MODE != 1:
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
        if MODE != 2:
            near = piece < num_local
            start_l = tl.load(local_start + piece, mask=near, other=0)
            length_l = tl.load(local_length + piece, mask=near, other=0)
            total = tl.zeros([W, BF], ACC)
            for place in tl.static_range(PS):
                inside = place < length_l
                column = tl.load(local_indices + start_l + place, mask=inside, other=0).to(tl.int64)
                value = tl.load(
                    x + column[:, None] * F + f[None, :], mask=inside[:, None] & in_f[None, :], other=0.0
                ).to(ACC)
                if HAS_W:
                    value *= tl.load(local_weight + start_l + place, mask=inside, other=0.0).to(ACC)[:, None]
                total += value
            tl.store(partial + piece.to(tl.int64)[:, None] * F + f[None, :], total, mask=near[:, None] & in_f[None, :])
        if MODE != 1:
            arrived = remote.to(ACC)
            if HAS_W:
                factor = tl.load(remote_weight + edge_r, mask=there, other=0.0).to(ACC)
                arrived *= factor[:, :, None]
            place_r = (num_local + piece).to(tl.int64)
            tl.store(partial + place_r[:, None] * F + f[None, :], tl.sum(arrived, 1), mask=far[:, None] & in_f[None, :])


@triton.jit
def _fetch_kernel(
    x, local_start, local_length, local_indices, local_weight,
    table, counts, halo_owner, halo_row, staging, partial, num_local, num_halo, num_slots, N,
    F: tl.constexpr, HAS_W: tl.constexpr, ACC: tl.constexpr, MODE: tl.constexpr,
    W: tl.constexpr, DIST: tl.constexpr, PS: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """DIST times W local pieces and W PS remote rows, which are copied to ``staging``; MODE 1 and 2: one side alone."""
    task = tl.program_id(2).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    in_f = f < F
    x += task * N * F
    partial += task * num_slots * F
    staging += task * num_halo * F
    for step in range(DIST):
        unit = (tl.program_id(0) * DIST + step) * W
        if MODE != 1:
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
        if MODE != 2:
            piece = unit + tl.arange(0, W)
            near = piece < num_local
            start_l = tl.load(local_start + piece, mask=near, other=0)
            length_l = tl.load(local_length + piece, mask=near, other=0)
            total = tl.zeros([W, BF], ACC)
            for place in tl.static_range(PS):
                inside = place < length_l
                column = tl.load(local_indices + start_l + place, mask=inside, other=0).to(tl.int64)
                value = tl.load(
                    x + column[:, None] * F + f[None, :], mask=inside[:, None] & in_f[None, :], other=0.0
                ).to(ACC)
                if HAS_W:
                    value *= tl.load(local_weight + start_l + place, mask=inside, other=0.0).to(ACC)[:, None]
                total += value
            tl.store(partial + piece.to(tl.int64)[:, None] * F + f[None, :], total, mask=near[:, None] & in_f[None, :])
        if MODE != 1:
            tl.store(
                staging + place_r.to(tl.int64)[:, None] * F + f[None, :], remote, mask=far[:, None] & in_f[None, :]
            )


@triton.jit
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


def sharded_spmm_triton(
    x: Tensor,
    table: Tensor,
    counts: Tensor,
    walk: ShardWalk,
    row_scale: Tensor | None = None,
    launch: ShardedLaunch | None = None,
    schedule: str = "fetch_interleaved",
    scratch: Tensor | None = None,
    staging: Tensor | None = None,
) -> Tensor:
    """Launch the kernels over ``x [..., n, F]`` and the peers in ``table`` and ``counts`` (:func:`address_table`).

    ``scratch``: memory for the partial rows, at least T (P + Q) F numbers; ``staging``: for remote rows, at least T h F
    numbers of the type of ``x``. Whatever is read of them is written before.
    """
    launch = launch or ShardedLaunch(ps=walk.ps)
    if schedule not in SCHEDULES:
        raise InputError(f"sharded_spmm: schedule={schedule!r} must be one of {', '.join(SCHEDULES)}")
    if launch.ps != walk.ps:
        raise InputError(f"sharded_spmm: the walk has pieces of {walk.ps}, the launch was made for ps={launch.ps}")
    lead, num_features = x.shape[:-2], x.shape[-1]
    x_TNF = x.reshape(lead.numel(), *x.shape[-2:]).contiguous()
    tasks, rows = x_TNF.shape[0], walk.num_rows
    out = x.new_empty(tasks, rows, num_features)
    if not out.numel():
        return out.reshape(*lead, rows, num_features)
    num_local, num_remote = walk.local_start.numel(), walk.remote_start.numel()
    acc = accumulate_dtype(x.dtype)
    size = tasks * (num_local + num_remote) * num_features
    partial = x.new_empty(max(size, 1), dtype=acc) if scratch is None else scratch
    ps = next_power_of_2(walk.ps)
    width = min(next_power_of_2(num_features), max(16, REMOTE_TILE // ps), 128)
    tiles, warps = cdiv(num_features, width), next_power_of_2(launch.warps)
    weighted = walk.local_weight is not None
    none = x_TNF

    def launch_pieces(pairs: int, mode: int, staged: bool = False) -> None:
        if pairs:
            source = address_table([rows_fetched], x.device) if staged else (table, counts)
            owner, row = (zeros, walk.remote_place) if staged else (walk.remote_owner, walk.remote_row)
            grid = (cdiv(pairs, warps * launch.dist), tiles, tasks)
            _pieces_kernel[grid](
                x_TNF, walk.local_start, walk.local_length, walk.local_indices,
                walk.local_weight if weighted else none, *source, walk.remote_start, walk.remote_length,
                owner, row, walk.remote_weight if weighted else none,
                partial, num_local, num_remote, rows,
                F=num_features, HAS_W=weighted, ACC=triton_acc(x.dtype), MODE=mode,
                W=warps, DIST=launch.dist, PS=ps, BF=width, num_warps=min(warps, 16),
            )  # fmt: skip

    def launch_fetch(mode: int) -> None:
        units = max(cdiv(num_halo, ps) if mode != LOCAL else 0, num_local if mode != REMOTE else 0)
        if units:
            grid = (cdiv(units, warps * launch.dist), tiles, tasks)
            _fetch_kernel[grid](
                x_TNF, walk.local_start, walk.local_length, walk.local_indices,
                walk.local_weight if weighted else none, table, counts, walk.halo_owner, walk.halo_row,
                rows_fetched, partial, num_local, num_halo, num_local + num_remote, rows,
                F=num_features, HAS_W=weighted, ACC=triton_acc(x.dtype), MODE=mode,
                W=warps, DIST=launch.dist, PS=ps, BF=width, num_warps=min(warps, 16),
            )  # fmt: skip

    num_halo = walk.halo_row.numel()
    if schedule.startswith("fetch"):
        shape = (tasks, num_halo, num_features)
        rows_fetched = x.new_empty(shape) if staging is None else staging[: math.prod(shape)].view(shape)
        zeros = torch.zeros_like(walk.remote_owner)
        for mode in (BOTH,) if schedule == "fetch_interleaved" else (REMOTE, LOCAL):
            launch_fetch(mode)
        launch_pieces(num_remote, REMOTE, staged=True)
    elif schedule == "interleaved":
        launch_pieces(max(num_local, num_remote), BOTH if num_local and num_remote else LOCAL if num_local else REMOTE)
    else:
        launch_pieces(num_local, LOCAL)
        launch_pieces(num_remote, REMOTE)
    _add_pieces_kernel[(cdiv(rows, 16), tiles, tasks)](
        partial, walk.local_ptr, walk.remote_ptr, row_scale if row_scale is not None else none, out,
        num_local, num_remote, rows,
        F=num_features, HAS_RS=row_scale is not None, ACC=triton_acc(x.dtype), BR=16, BF=width, num_warps=4,
    )  # fmt: skip
    return out.reshape(*lead, rows, num_features)
