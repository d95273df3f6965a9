"""The edges of a shard in the pieces that the sharded kernel takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from weft.dist.partition import halo_of, neighbour_pieces, places_in, row_offsets, split_edges
from weft.ops.csr.packed import PackedCSR
from weft.ops.csr.worklist import WorkList, build_worklist, thresholds
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
    place = places_in(halo, far_columns)
    owner = torch.searchsorted(cuts, halo, right=True) - 1
    chunk_rows = [halo.numel() * chunk // chunks for chunk in range(chunks + 1)]
    most = ps or WHOLE_ROWS
    near = neighbour_pieces(split.local_indptr, most)
    far, far_rows, chunk_of = _chunked_pieces(split.remote_indptr, place, chunk_rows, most)
    order = torch.sort(chunk_of, stable=True).indices
    per_chunk = torch.bincount(chunk_of, minlength=chunks).cumsum(0).tolist()
    return ShardedCSR(
        _piece_offsets(near[0], rows),
        near[1],
        near[2].to(torch.int32),
        split.local_indices,
        _piece_offsets(far_rows, rows),
        far[1],
        far[2].to(torch.int32),
        split.remote_owner,
        split.remote_row,
        place,
        owner.to(torch.int32),
        (halo - cuts[owner]).to(torch.int32),
        ps,
        order.to(torch.int32),
        (0, *per_chunk),
        tuple(chunk_rows),
        None if weight is None else weight[split.local_order].contiguous(),
        None if weight is None else weight[split.remote_order].contiguous(),
    )


def _chunked_pieces(
    indptr: Tensor, place: Tensor, chunk_rows: Sequence[int], ps: int
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """Pieces of remote edges, cut by row, chunk and ``ps``; with the row and the chunk of each.

    The columns of a row ascend, and so do its places among the remote rows: the edges of a chunk are consecutive.
    """
    chunks, rows = len(chunk_rows) - 1, indptr.numel() - 1
    if chunks == 1:
        pieces = neighbour_pieces(indptr, ps)
        return pieces, pieces[0], torch.zeros_like(pieces[0])
    ends = torch.tensor(chunk_rows[1:], device=place.device)
    row = torch.repeat_interleave(torch.arange(rows, device=place.device), indptr.diff().long())
    part = row * chunks + torch.searchsorted(ends, place, right=True)
    offsets = torch.zeros(rows * chunks + 1, dtype=torch.int64, device=place.device)
    torch.cumsum(torch.bincount(part, minlength=rows * chunks), 0, out=offsets[1:])
    pieces = neighbour_pieces(offsets, ps)
    return pieces, pieces[0] // chunks, pieces[0] % chunks


def _piece_offsets(piece_rows: Tensor, rows: int) -> Tensor:
    offsets = torch.zeros(rows + 1, dtype=torch.int64, device=piece_rows.device)
    torch.cumsum(torch.bincount(piece_rows, minlength=rows), 0, out=offsets[1:])
    return offsets


# ---- The edges of a shard by tile of remote rows, as the streamed kernel takes them

# Of a tile's rows, from which share on all are copied: a copy has 55 GB/s, reads over PCIe by a kernel 43 to 47, and
# those hold up the sums beside them.
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
    found = []
    for owner, low, high in _ranges(bounds, rank, tiles):
        inside = ((far >= low) & (far < high)).nonzero().squeeze(1)
        if inside.numel():
            own = None if factors is None else factors[inside].contiguous()
            ends = (owner, low - bounds[owner], high - bounds[owner])
            found.append(_tile(ends, row_of[inside], far[inside] - low, rows, own, whole))
    near = None if weight is None else weight[split.local_order].contiguous()
    return TiledCSR(local, tuple(found), near)


def _ranges(bounds: Sequence[int], rank: int, tiles: int | None) -> Iterator[tuple[int, int, int]]:
    """``(owner, low, high)`` of every tile: the nodes of all other ranks, cut into tiles and where owners change."""
    others = [(owner, bounds[owner], bounds[owner + 1]) for owner in range(len(bounds) - 1) if owner != rank]
    remote = sum(high - low for _, low, high in others)
    ends, before = tile_ends(remote, tiles or tile_count(remote)), 0
    for owner, low, high in others:
        cuts = [low, *(low + end - before for end in ends if before < end < before + high - low), high]
        yield from ((owner, a, b) for a, b in itertools.pairwise(cuts) if a < b)
        before += high - low


def _tile(
    ends: tuple[int, int, int], row_of: Tensor, column: Tensor, rows: int, weight: Tensor | None, whole: float
) -> Tile:
    owner, first, last = ends
    seen = torch.zeros(last - first, dtype=torch.bool, device=column.device)
    seen[column] = True
    needed = seen.nonzero().squeeze(1)
    if needed.numel() >= whole * (last - first):
        return Tile(owner, first, last, None, _with_edges(row_of, column.to(torch.int32), rows), weight)
    csr = _with_edges(row_of, places_in(needed, column), rows)
    return Tile(owner, first, last, (needed + first).to(torch.int32), csr, weight)


def _with_edges(row_of: Tensor, column: Tensor, rows: int) -> PackedCSR:
    """Of the rows that have any; the others are not touched."""
    csr = _packed(row_offsets(row_of, rows), column)
    assert csr.work is not None
    return replace(csr, work=_nonempty(csr.work))


def _packed(indptr: Tensor, indices: Tensor) -> PackedCSR:
    none = indices.new_empty(0)
    work = build_worklist(indptr, *thresholds(indices.numel(), indptr.numel() - 1))
    return PackedCSR(indptr, indices, none, none, work)


def _nonempty(work: WorkList) -> WorkList:
    """Light rows come by length: those without edges are the last."""
    count = int((work.light_len > 0).sum())
    return replace(
        work, light_start=work.light_start[:count], light_len=work.light_len[:count], light_row=work.light_row[:count]
    )
