"""Rank 0 of two: its half of a graph on the device, and the rows of rank 1 in pinned host memory (or on the device)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.timing import synchronize, time_calls
from weft import ops
from weft.dist.partition import halo_of, own_rows, to_block
from weft.dist.shard_csr import shard_csr, tiled_csr
from weft.dist.sharded_adjacency import CHUNK_ROWS, MOST_CHUNKS
from weft.ops.csr.adjacency import Adjacency
from weft.ops.sampling.gather_rows_triton import gather_rows_triton
from weft.ops.sharded.shard import ShardedCSR, ShardedLaunch, address_table, pipelined_seconds
from weft.ops.sharded.sharded_spmm import sharded_spmm_triton
from weft.ops.sharded.streamed_spmm import TiledCSR, streamed_spmm_triton
from weft.ops.sparse.spmm_triton import spmm_triton
from weft.planner.kernel_tuner import KernelShape
from weft.planner.partition import split_by_edges

FLOAT = 4


class HalfOfAGraph:
    """The rows of rank 0 and what it reads of rank 1; ``seconds``: of cutting the graph, on its device."""

    def __init__(self, adj: Adjacency, link: str) -> None:
        self.device = adj.device
        begin = time.perf_counter()
        self.bounds = split_by_edges(adj.indptr.cpu().numpy(), 2).bounds
        self.high, self.nodes = self.bounds[1], adj.num_rows
        self.indptr, self.columns, _, _ = own_rows(adj, 0, self.high)
        self.halo = halo_of(self.columns, 0, self.high).long()
        block = to_block(self.columns, self.halo.int(), 0, self.high)
        synchronize(self.device)
        self.seconds = time.perf_counter() - begin
        self.halo_rows = self.halo - self.high  # on rank 1
        self.block = Adjacency(self.indptr, block, self.high + self.halo.numel())
        self.whole = Adjacency(self.indptr, self.columns, self.nodes)
        self.remote_edges = int((self.columns >= self.high).sum())
        self._pinned, self._speeds, self._far = link == "pinned", dict[int, float](), dict[int, Tensor]()
        self._csrs, self._rows = dict[tuple[int, int], ShardedCSR](), dict[int, tuple[Tensor, Tensor]]()
        self._tiled = dict[int, TiledCSR]()

    @property
    def chunks(self) -> int:
        """Chunks of remote rows, as training cuts them."""
        return min(MOST_CHUNKS, max(1, self.halo.numel() // CHUNK_ROWS))

    def shape(self, features: int) -> KernelShape:
        """For the tuner."""
        return KernelShape(features, self.columns.numel() - self.remote_edges, self.remote_edges, self.high)

    def csr(self, ps: int, chunks: int) -> ShardedCSR:
        """The edges in pieces of ``ps``; the last one is kept."""
        if (ps, chunks) not in self._csrs:
            self._csrs = {(ps, chunks): shard_csr(self.indptr, self.columns, self.bounds, 0, ps, chunks=chunks)}
        return self._csrs[ps, chunks]

    def rows(self, features: int) -> tuple[Tensor, Tensor]:
        """Own rows on the device, and those of rank 1 where they lie; the last ones are kept.

        Own rows are the first of a matrix with room for all of rank 1, so that fetching them moves nothing else.
        """
        if features not in self._rows:
            near = torch.randn(self.nodes, features, device=self.device)[: self.high]
            self._rows = {features: (near, self.far(features))}
        return self._rows[features]

    def _with_room(self, near: Tensor, more: int) -> Tensor:
        """``near`` with room for ``more`` rows below it: where it lies if there is room, else a copy."""
        size = (near.shape[0] + more, near.shape[1])
        if near.untyped_storage().nbytes() >= size[0] * size[1] * FLOAT:
            return near.as_strided(size, (size[1], 1))
        rows = torch.empty(size, device=self.device)
        rows[: near.shape[0]].copy_(near)
        return rows

    def far(self, features: int) -> Tensor:
        """Rows of rank 1 where they lie; kept."""
        if features not in self._far:
            rows = torch.randn(self.nodes - self.high, features, device=self.device)
            self._far[features] = torch.empty(rows.shape, pin_memory=True).copy_(rows) if self._pinned else rows
        return self._far[features]

    def sharded(self, near: Tensor, far: Tensor, launch: ShardedLaunch, schedule: str) -> Tensor:
        """Weft's aggregation by one of its schedules."""
        table, counts = address_table([near, far], self.device)
        csr = self.csr(launch.ps, self.chunks)
        return sharded_spmm_triton(near, table, counts, csr, None, launch, schedule)

    def tiled(self, tiles: int = 0) -> TiledCSR:
        """The edges by tile of remote rows; ``tiles``: how many, 0 for as many as training takes. All are kept."""
        if tiles not in self._tiled:
            self._tiled[tiles] = tiled_csr(self.indptr, self.columns, self.bounds, 0, tiles=tiles or None)
        return self._tiled[tiles]

    def streamed(self, near: Tensor, far: Tensor, overlap: bool = True, tiles: int = 0) -> Tensor:
        """Weft's aggregation while remote rows arrive, tile by tile.

        Without ``overlap`` one after another, in one tile: what suits a schedule that waits for all of them.
        """
        return streamed_spmm_triton(near, [near, far], self.tiled(tiles if overlap else 1), None, overlap)

    def predicted_ms(self, features: int, near: Tensor) -> float:
        """Of the streamed aggregation, from the link's speed and from sums over rows that are on the device."""
        csr, total = self.tiled(), torch.empty(1, self.high, features, device=self.device)
        staged = [torch.empty(1, tile.rows, features, device=self.device) for tile in csr.tiles]
        local = _ms(lambda: spmm_triton(near[None], None, None, None, csr.local, out=total), self.device)
        sums = [
            _ms(lambda t=tile, x=rows: spmm_triton(x, None, None, None, t.csr, out=total, add=True), self.device)
            for tile, rows in zip(csr.tiles, staged, strict=True)
        ]
        link = csr.staged_rows * features * FLOAT / self.link_speed(features) / 1e6
        return pipelined_seconds(link, local, sums, [tile.rows / max(csr.staged_rows, 1) for tile in csr.tiles])

    def gathered(self, near: Tensor, far: Tensor) -> Tensor:
        """Fetch, then aggregate: the remote rows that are needed, by the gather of sampled training, then SpMM."""
        rows = self._with_room(near, self.halo.numel())
        gather_rows_triton(far, self.halo_rows, rows[self.high :])
        return ops.spmm(self.block, rows)

    def copied(self, near: Tensor, far: Tensor) -> Tensor:
        """Fetch, then aggregate: all rows of rank 1 by one copy to where SpMM reads them, then SpMM."""
        rows = self._with_room(near, far.shape[0])
        rows[self.high :].copy_(far, non_blocking=True)
        return ops.spmm(self.whole, rows)

    def forward_pass(
        self, widths: Sequence[int], aggregate_first: bool, aggregate: Callable[[Tensor, Tensor], Tensor]
    ) -> Callable[[], Tensor]:
        """A forward pass of rank 0 over layers of ``widths``: products on its rows, aggregations over the link.

        A GCN multiplies first and aggregates the narrower rows; a GIN aggregates first. What rank 1 would have computed
        is random numbers of the same size, where it lies. Own rows are new in every layer: fetching first copies them
        to where SpMM reads all rows, about 2 % of its time.
        """
        weights = [torch.randn(a, b, device=self.device) / a**0.5 for a, b in itertools.pairwise(widths)]
        far = {width: self.far(width) for width in (widths[:-1] if aggregate_first else widths[1:])}
        x = torch.randn(self.high, widths[0], device=self.device)

        def run() -> Tensor:
            h = x
            for place, weight in enumerate(weights, 1):
                h = h + aggregate(h, far[h.shape[1]]) if aggregate_first else h
                h = h @ weight
                h = h if aggregate_first else aggregate(h, far[h.shape[1]])
                h = h.relu() if place < len(weights) else h
            return h

        return run

    def link_speed(self, features: int) -> float:
        """GB/s of one large copy from where remote rows lie."""
        if features not in self._speeds:
            far = self.rows(features)[1]
            target = torch.empty(far.shape, device=self.device)
            took = time_calls(lambda: target.copy_(far, non_blocking=True), self.device, warmup=1, repeats=5)
            self._speeds[features] = far.numel() * FLOAT / took.ms / 1e6
        return self._speeds[features]


def _ms(call: Callable[[], Any], device: torch.device) -> float:
    return time_calls(call, device, warmup=1, repeats=5).ms
