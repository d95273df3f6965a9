"""streamed_spmm: the aggregation of a shard while the rows of peers arrive, tile by tile.

The remote rows are cut into tiles of consecutive rows. A stream of its own copies tile after tile to a staging area,
each row once. Meanwhile the plain SpMM sums the local edges, and then adds the edges of every tile that has arrived.
Tiles are added in their order, whenever they arrive: a run has the same bits as the next.

A tile of which most rows are needed is copied whole, by the copy engine: at the full rate of the link, while
sums hardly slow down (training took 1.09 times as long during such copies on an H200, and 4.1 times as long during
reads over PCIe by kernels: benchmarks/results/division.json). Of other tiles a kernel reads the rows that are needed.

Shapes: T tasks, n own rows, F features, s rows of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.ops.csr.packed import PackedCSR
from weft.ops.launch.backend import accumulate_dtype
from weft.ops.sharded.pieces_triton import copy_rows_triton, copying_stream
from weft.ops.sharded.sharded_spmm import address_table
from weft.ops.sparse.spmm import spmm_triton


@dataclass(frozen=True)
class Tile:
    """Rows ``first`` to ``last`` of rank ``owner``, and the edges from them.

    ``needed [s]`` int32: those of its rows that are read; None: all of them. ``csr``: n rows, s columns, with a work
    list of the rows that have edges here. ``weight``: factors of the edges (None: 1).
    """

    owner: int
    first: int
    last: int
    needed: Tensor | None
    csr: PackedCSR
    weight: Tensor | None = None

    @property
    def rows(self) -> int:
        """Rows that are staged."""
        return self.last - self.first if self.needed is None else self.needed.numel()


@dataclass(frozen=True)
class TiledCSR:
    """The edges of a shard: local ones, and remote ones by tile. ``local``: n rows, all of them in the work list."""

    local: PackedCSR
    tiles: tuple[Tile, ...]
    local_weight: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Own rows n."""
        return self.local.num_rows

    @property
    def staged_rows(self) -> int:
        """Of all tiles."""
        return sum(tile.rows for tile in self.tiles)


def streamed_spmm_triton(
    x: Tensor,
    peers: Sequence[Tensor],
    csr: TiledCSR,
    row_scale: Tensor | None = None,
    overlap: bool = True,
    staging: Tensor | None = None,
) -> Tensor:
    """Launch over ``x [..., n, F]`` and ``peers[g] [..., n_g, F]``, which may lie on the host (pinned) or elsewhere.

    ``overlap=False``: the same kernels one after another. ``staging``: memory for remote rows, at least T times
    ``staged_rows`` times F numbers of the type of ``x``. Whatever is read of it is written before.
    """
    lead, (num_rows, features) = x.shape[:-2], x.shape[-2:]
    if num_rows != csr.num_rows:
        raise InputError(f"streamed_spmm: x has {num_rows} rows, the shard has {csr.num_rows}; they must agree")
    tasks = lead.numel()
    x_TNF = x.reshape(tasks, num_rows, features).contiguous()
    total = x.new_empty(tasks, num_rows, features, dtype=accumulate_dtype(x.dtype))
    size = tasks * csr.staged_rows * features
    memory = x.new_empty(size) if staging is None else staging[:size]
    if total.numel():
        sizes = [tasks * tile.rows * features for tile in csr.tiles]
        areas = memory.split(sizes) if sizes else ()
        parts = [area.view(tasks, tile.rows, features) for area, tile in zip(areas, csr.tiles, strict=True)]
        rows_of = [peer.reshape(tasks, *peer.shape[-2:]) for peer in peers]
        # Both are read on the other stream: they live until this one has waited for the last tile.
        table = address_table(rows_of, x.device) if any(tile.needed is not None for tile in csr.tiles) else None
        arrived = _fetch(x, rows_of, table, csr.tiles, parts, overlap)
        spmm_triton(x_TNF, csr.local_weight, row_scale, None, csr.local, out=total)
        for tile, part, ready in zip(csr.tiles, parts, arrived, strict=True):
            if ready is not None:
                torch.cuda.current_stream(x.device).wait_event(ready)
            spmm_triton(part, tile.weight, row_scale, None, tile.csr, out=total, add=True)
    return total.to(x.dtype).reshape(*lead, num_rows, features)


def _fetch(
    x: Tensor,
    peers: Sequence[Tensor],
    table: tuple[Tensor, Tensor] | None,
    tiles: Sequence[Tile],
    parts: Sequence[Tensor],
    overlap: bool,
) -> list[Any]:
    """Begin to copy all tiles; an event per tile, None where there is nothing to wait for."""
    side, copying = None, nullcontext()
    if x.is_cuda and overlap:
        side = copying_stream(x.device.index or 0)
        side.wait_stream(torch.cuda.current_stream(x.device))
        copying = torch.cuda.stream(side)  # type: ignore[assignment]
    arrived = []
    with copying:
        for tile, part in zip(tiles, parts, strict=True):
            if tile.needed is None:
                for task in range(part.shape[0]):  # each a run of bytes, which the copy engine takes
                    part[task].copy_(peers[tile.owner][task, tile.first : tile.last], non_blocking=True)
            else:
                owner = torch.full_like(tile.needed, tile.owner)
                copy_rows_triton(part, *table, owner, tile.needed, 0, tile.rows)
            arrived.append(None if side is None else side.record_event())
    return arrived
