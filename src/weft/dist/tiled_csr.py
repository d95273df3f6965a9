"""The edges of a shard by tile of remote rows, as the streamed kernel takes them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from weft.dist.partition_arrays import places_in, row_offsets, split_edges
from weft.ops.csr.packed import PackedCSR
from weft.ops.csr.worklist import WorkList, build_worklist, thresholds
from weft.ops.sharded.streamed_spmm import Tile, TiledCSR
from weft.ops.sharded.tiling import tile_count, tile_ends

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
