"""The edges of a shard in the pieces that the sharded kernel takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.dist.partition_arrays import halo_of, neighbour_pieces, places_in, split_edges
from weft.ops.sharded.shard import ShardedCSR

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
