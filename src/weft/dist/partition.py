"""The parts of a partition that touch every edge, with tensors; :mod:`weft.planner.partition` says what they mean.

Shapes: N nodes, E edges, n nodes of a rank, h remote nodes that it reads, P pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.errors import SpecError
from weft.ops.csr.adjacency import Adjacency, offset_dtype


def divided_otherwise(bounds: Sequence[int]) -> list[int]:
    """The bounds if every rank gives the later half of its rows to the next; if they are few, the last has them all."""
    few = bounds[-1] < 4 * (len(bounds) - 1)
    halves = [0 if few else end - (end - begin) // 2 for begin, end in itertools.pairwise(bounds)]
    return [0, *halves[:-1], bounds[-1]]


def own_rows(adj: Adjacency, low: int, high: int) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Rows ``low`` to ``high`` of ``adj``: ``(indptr [n+1], columns [e], weight [e], first edge)``."""
    first, last = int(adj.indptr[low]), int(adj.indptr[high])
    indptr = (adj.indptr[low : high + 1].long() - first).to(offset_dtype(last - first))
    weight = None if adj.weight is None else adj.weight[first:last]
    return indptr, adj.indices[first:last], weight, first


def own_rows_of_transpose(adj: Adjacency, low: int, high: int) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """The same of the transpose, without building the whole of it: out-edges of the nodes, destinations ascending."""
    mine = ((adj.indices >= low) & (adj.indices < high)).nonzero().squeeze(1)
    sources, rows = adj.indices[mine].long() - low, torch.searchsorted(adj.indptr, mine, right=True, out_int32=True) - 1
    order = torch.sort(sources, stable=True).indices  # edges come by row, so rows stay ascending
    indptr = row_offsets(sources, high - low).to(offset_dtype(mine.numel()))
    weight = None if adj.weight is None else adj.weight[mine[order]]
    return indptr, rows[order].to(torch.int32), weight, int((adj.indices < low).sum())


def halo_of(columns: Tensor, low: int, high: int) -> Tensor:
    """The remote nodes ``[h]`` among ``columns``, ascending; marked, not sorted: there are many edges per node."""
    far = columns[(columns < low) | (columns >= high)]
    if not far.numel():
        return far
    seen = torch.zeros(int(far.max()) + 1, dtype=torch.bool, device=far.device)
    seen[far.long()] = True
    return seen.nonzero().squeeze(1).to(columns.dtype)


def positions_in(ids: Tensor, columns: Tensor) -> Tensor:
    """Where every one of ``columns``, which are all among ``ids``, stands there; int32."""
    if not ids.numel():
        return torch.zeros_like(columns, dtype=torch.int32)
    position = torch.empty(int(ids.max()) + 1, dtype=torch.int32, device=ids.device)
    position[ids.long()] = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device)
    return position[columns.long()]


def to_block(columns: Tensor, halo: Tensor, low: int, high: int) -> Tensor:
    """Global ids as columns of a block: own nodes first, then those of ``halo``; int32."""
    if not halo.numel():
        return (columns - low).to(torch.int32)
    return positions_in(torch.cat([torch.arange(low, high, device=halo.device), halo.long()]), columns)


@dataclass(frozen=True)
class SplitEdges:
    """A shard's edges by where their source is. ``remote_owner`` and ``remote_row``: where a remote row lies."""

    local_indptr: Tensor
    local_indices: Tensor
    remote_indptr: Tensor
    remote_owner: Tensor
    remote_row: Tensor
    local_order: Tensor  # positions of the local edges among all edges of the shard
    remote_order: Tensor


def split_edges(indptr: Tensor, columns: Tensor, bounds: Sequence[int], rank: int) -> SplitEdges:
    """The local and the remote CSR of a shard with rows ``indptr [n+1]`` and global ``columns [e]``."""
    low, high = bounds[rank], bounds[rank + 1]
    is_local = (columns >= low) & (columns < high)
    before = torch.zeros(columns.numel() + 1, dtype=torch.int64, device=columns.device)  # local edges before each
    torch.cumsum(is_local, 0, out=before[1:])
    local_indptr = before[indptr.long()]
    local, remote = is_local.nonzero().squeeze(1), (~is_local).nonzero().squeeze(1)
    cuts = torch.tensor(bounds, device=columns.device, dtype=columns.dtype)
    far = columns[remote]
    owner = torch.searchsorted(cuts, far, right=True, out_int32=True) - 1
    return SplitEdges(
        local_indptr,
        (columns[local] - low).to(torch.int32),
        indptr.long() - local_indptr,
        owner,
        (far - cuts[owner]).to(torch.int32),
        local,
        remote,
    )


def row_offsets(rows: Tensor, count: int) -> Tensor:
    """Offsets ``[count + 1]`` of rows, given the row of every entry."""
    indptr = torch.zeros(count + 1, dtype=torch.int64, device=rows.device)
    torch.cumsum(torch.bincount(rows, minlength=count), 0, out=indptr[1:])
    return indptr


def neighbour_pieces(indptr: Tensor, ps: int) -> tuple[Tensor, Tensor, Tensor]:
    """``(row [P], start [P], length [P])`` of pieces of at most ``ps`` edges, in order."""
    if ps < 1:
        raise SpecError(f"ps={ps} must be at least 1")
    degree = indptr.diff().long()
    count = (degree + ps - 1) // ps
    row = torch.repeat_interleave(torch.arange(degree.numel(), device=indptr.device), count)
    first = torch.cumsum(count, 0) - count
    inside = torch.arange(row.numel(), device=indptr.device) - first[row]
    start = indptr[:-1].long()[row] + inside * ps
    return row, start, torch.minimum(indptr[1:].long()[row] - start, torch.tensor(ps, device=indptr.device))


def count_remote(adj: Adjacency, bounds: Sequence[int]) -> list[int]:
    """Edges of every rank whose source is on another rank."""
    counts = []
    for low, high in itertools.pairwise(bounds):
        _, columns, _, _ = own_rows(adj, low, high)
        counts.append(int(((columns < low) | (columns >= high)).sum()))
    return counts
