"""The edges of a shard in the pieces that the sharded kernel takes, and by tile for the streamed one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from weft.dist.partition import halo_of, neighbour_pieces, positions_in, row_offsets, split_edges
from weft.ops.csr.packed import PackedCSR
from weft.ops.csr.worklist import build_worklist, thresholds
from weft.ops.sharded.sharded_spmm import ShardedCSR, tile_count, tile_ends
from weft.ops.sharded.streamed_spmm import Tile, TiledCSR

WHOLE_ROWS = 2**31 - 1


def shard_csr(
    indptr: Tensor,
    columns: Tensor,
    bounds: Sequence[int],
    rank: int,
    ps: int,
    weight: Tensor | None = None,
    chunks: int = 1,
) -> ShardedCSR:
    """Local and remote pieces of rows ``indptr [n+1]`` with global ``columns [E]``; ``weight [E]``: factors.

    ``ps``: neighbours of a piece, 0 for all of a row. ``chunks``: into how many parts the remote rows are cut; no piece
    reaches over two of them.
    """
    split = split_edges(indptr, columns, bounds, rank)
    rows = indptr.numel() - 1
    cuts = torch.tensor(bounds, device=columns.device)
    far_columns = columns[split.remote_order]
    halo = halo_of(far_columns, bounds[rank], bounds[rank + 1]).long()
    staged = positions_in(halo, far_columns)
    owner = torch.searchsorted(cuts, halo, right=True) - 1
    chunk_rows = [halo.numel() * chunk // chunks for chunk in range(chunks + 1)]
    most = ps or WHOLE_ROWS
    near = neighbour_pieces(split.local_indptr, most)
    if chunks == 1:
        far = neighbour_pieces(split.remote_indptr, most)
        far_rows, chunk_of = far[0], torch.zeros_like(far[0])
    else:
        # Columns of a row ascend, and so do its staged rows: the edges of a chunk are consecutive.
        row = torch.repeat_interleave(torch.arange(rows, device=staged.device), split.remote_indptr.diff().long())
        ends = torch.tensor(chunk_rows[1:], device=staged.device)
        part = row * chunks + torch.searchsorted(ends, staged, right=True)
        far = neighbour_pieces(row_offsets(part, rows * chunks), most)
        far_rows, chunk_of = far[0] // chunks, far[0] % chunks
    order = torch.sort(chunk_of, stable=True).indices
    per_chunk = torch.bincount(chunk_of, minlength=chunks).cumsum(0).tolist()
    return ShardedCSR(
        row_offsets(near[0], rows),
        near[1],
        near[2].to(torch.int32),
        split.local_indices,
        row_offsets(far_rows, rows),
        far[1],
        far[2].to(torch.int32),
        split.remote_owner,
        split.remote_row,
        staged,
        owner.to(torch.int32),
        (halo - cuts[owner]).to(torch.int32),
        ps,
        order.to(torch.int32),
        (0, *per_chunk),
        tuple(chunk_rows),
        None if weight is None else weight[split.local_order].contiguous(),
        None if weight is None else weight[split.remote_order].contiguous(),
    )


# Of a tile's rows, from which share on all are copied: a copy has 55 GB/s, reads over PCIe by a kernel 43 to 47, and
# those delay the sums that run at the same time.
WHOLE = 0.6


def tiled_csr(
    indptr: Tensor,
    columns: Tensor,
    bounds: Sequence[int],
    rank: int,
    weight: Tensor | None = None,
    tiles: int | None = None,
    whole: float = WHOLE,
) -> TiledCSR:
    """Rows ``indptr [n+1]`` with global ``columns [E]``; ``weight [E]``: factors. ``tiles``: how many (None: by rows).

    ``whole``: the share of needed rows from which on a tile is copied as it is.
    """
    split, rows = split_edges(indptr, columns, bounds, rank), indptr.numel() - 1
    local = _packed(split.local_indptr, split.local_indices)
    far = columns[split.remote_order].long()
    row_of = torch.repeat_interleave(torch.arange(rows, device=columns.device), split.remote_indptr.diff())
    factors = None if weight is None else weight[split.remote_order]
    built = []
    for owner, low, high in _ranges(bounds, rank, tiles):
        inside = ((far >= low) & (far < high)).nonzero().squeeze(1)
        if not inside.numel():
            continue
        column, first = far[inside] - low, low - bounds[owner]
        seen = torch.zeros(high - low, dtype=torch.bool, device=column.device)
        seen[column] = True
        needed: Tensor | None = seen.nonzero().squeeze(1)
        if needed.numel() >= whole * (high - low):
            needed, indices = None, column.to(torch.int32)
        else:
            indices, needed = positions_in(needed, column), (needed + first).to(torch.int32)
        csr = _packed(row_offsets(row_of[inside], rows), indices)
        # Light rows come by length: those without edges are the last, and are not touched.
        count = int((csr.work.light_len > 0).sum())
        light = {name: getattr(csr.work, name)[:count] for name in ("light_start", "light_len", "light_row")}
        csr = replace(csr, work=replace(csr.work, **light))
        tile_weight = None if factors is None else factors[inside].contiguous()
        built.append(Tile(owner, first, high - bounds[owner], needed, csr, tile_weight))
    near = None if weight is None else weight[split.local_order].contiguous()
    return TiledCSR(local, tuple(built), near)


def _ranges(bounds: Sequence[int], rank: int, tiles: int | None) -> Iterator[tuple[int, int, int]]:
    """``(owner, low, high)`` of every tile: the nodes of all other ranks, cut into tiles and where owners change."""
    peers = [(owner, bounds[owner], bounds[owner + 1]) for owner in range(len(bounds) - 1) if owner != rank]
    remote = sum(high - low for _, low, high in peers)
    ends, before = tile_ends(remote, tiles or tile_count(remote)), 0
    for owner, low, high in peers:
        cuts = [low, *(low + end - before for end in ends if before < end < before + high - low), high]
        yield from ((owner, a, b) for a, b in itertools.pairwise(cuts) if a < b)
        before += high - low


def _packed(indptr: Tensor, indices: Tensor) -> PackedCSR:
    none = indices.new_empty(0)
    work = build_worklist(indptr, *thresholds(indices.numel(), indptr.numel() - 1))
    return PackedCSR(indptr, indices, none, none, work)
