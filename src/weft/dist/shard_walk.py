"""The edges of a shard in the pieces that the sharded kernel takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.dist.partition_arrays import neighbour_pieces, split_edges
from weft.ops.sparse.sharded_spmm_triton import ShardWalk


def shard_walk(
    indptr: Tensor,
    columns: Tensor,
    bounds: Sequence[int],
    rank: int,
    ps: int,
    weight: Tensor | None = None,
) -> ShardWalk:
    """Local and remote pieces of rows ``indptr [n+1]`` with global ``columns [E]``; ``weight [E]``: factors."""
    split = split_edges(indptr, columns, bounds, rank)
    near, far = neighbour_pieces(split.local_indptr, ps), neighbour_pieces(split.remote_indptr, ps)
    rows = indptr.numel() - 1
    cuts = torch.tensor(bounds, device=columns.device)
    halo, place = torch.unique(columns[split.remote_order].long(), return_inverse=True)
    owner = torch.searchsorted(cuts, halo, right=True) - 1
    return ShardWalk(
        _piece_offsets(near[0], rows),
        near[1],
        near[2].to(torch.int32),
        split.local_indices,
        _piece_offsets(far[0], rows),
        far[1],
        far[2].to(torch.int32),
        split.remote_owner,
        split.remote_row,
        place.to(torch.int32),
        owner.to(torch.int32),
        (halo - cuts[owner]).to(torch.int32),
        ps,
        None if weight is None else weight[split.local_order].contiguous(),
        None if weight is None else weight[split.remote_order].contiguous(),
    )


def _piece_offsets(piece_rows: Tensor, rows: int) -> Tensor:
    offsets = torch.zeros(rows + 1, dtype=torch.int64, device=piece_rows.device)
    torch.cumsum(torch.bincount(piece_rows, minlength=rows), 0, out=offsets[1:])
    return offsets
