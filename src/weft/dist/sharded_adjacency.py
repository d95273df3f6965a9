"""The part of a graph that one rank trains on: ShardedAdjacency, some rows of the adjacency, and ShardGraph.

Its aggregation reads the rows of remote nodes from peers.

A layer sees a square matrix over the n nodes of this rank and hands it ``x [..., n, F]``. The aggregation works on a
block of n rows and n + h columns: own nodes first, then the h remote nodes that own rows have edges from. The block's
edges stand in the order of the whole matrix, so sums on a CPU have the bits of a run on one rank.

- ``spmm`` reads remote rows forward, and rows of the gradient over the transposed shard backward: reads both ways.
- The maximum and the attentions extend their input by the remote rows; gradients of those go back to their owners.

Shapes: n own nodes, h remote nodes, E edges of the own rows, H heads, D features of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft import ops
from weft.core.errors import InputError
from weft.dist.exchange import Collective, Exchange, Staging, make_halo
from weft.dist.partition import divided_otherwise, own_rows, own_rows_of_transpose, row_offsets, to_block
from weft.dist.ranks import Ranks
from weft.dist.shard_csr import shard_csr, tiled_csr
from weft.graph.graph import Graph
from weft.graph.labels import Split
from weft.graph.sparse_features import SparseFeatures
from weft.ops.attention.gat import attention_torch, coefficient_mask, take_apart
from weft.ops.attention.gatv2 import attention_v2_torch
from weft.ops.csr.adjacency import Adjacency, loop_weights, offset_dtype
from weft.ops.csr.packed import pack_csr, unpack_csr
from weft.ops.csr.relation_slots import RelationSlots, make_relation_slots
from weft.ops.launch.backend import rate_and_clock, use_triton
from weft.ops.sampling.sample_triton import CachedLists, spread_lists
from weft.ops.sharded.pieces_triton import copy_rows_triton
from weft.ops.sharded.sharded_spmm import ShardedCSR, ShardedLaunch, address_table, sharded_spmm_triton
from weft.ops.sharded.streamed_spmm import streamed_spmm_triton

# ---- Spread: arrays whose rows lie with the ranks that own them, read at any ids.
#
# Ranks of one host read peers' memory, without waiting for each other; between machines they request rows of their
# owners through torch.distributed, and then all ranks have to read at the same time.
#
# Shapes: N rows of all ranks, n rows of this one, M ids requested here, A rows that all ranks request of this one.


class Spread:
    """``part [n, ...]``: this rank's rows of an array ``[N, ...]``; ``bounds``: where those of the ranks begin and end.

    All ranks make one together. ``here``: this rank's rows, in the memory that peers read if there is such memory.
    """

    def __init__(self, part: Tensor, bounds: Sequence[int], ranks: Ranks) -> None:
        self._ranks, self._bounds, self._parts = ranks, tuple(bounds), ranks.spread(part)
        self.here = part if self._parts is None else self._parts[ranks.rank]
        self._lows, self._ends = torch.tensor([self._bounds[:-1], self._bounds[1:]], device=part.device)
        low, high = self._bounds[ranks.rank : ranks.rank + 2]
        self._some = low if high > low else 0  # an id that exists, of this rank if it has any

    @cached_property
    def in_reach(self) -> bool:
        """Whether kernels on this rank's GPU read the rows of all ranks by their addresses."""
        parts = self._parts
        return parts is not None and use_triton(self.here) and all(p.device == self.here.device for p in parts)

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor]:
        return address_table([part.view(part.shape[0], self._width) for part in self._parts], self.here.device)

    @property
    def _width(self) -> int:
        return math.prod(self.here.shape[1:])

    def __getitem__(self, ids: Tensor) -> Tensor:
        """Rows ``[M, ...]`` of the ids ``[M]``, in their order."""
        return self.rows(ids)

    def rows(self, ids: Tensor, count: Tensor | None = None) -> Tensor:
        """The same; with ``count [1]`` only the first so many ids exist, and the rows of the others mean nothing."""
        if self._parts is None:
            assert count is None, "requests to owners are of ids that exist"
            return self._requested(ids)
        ids = ids.long()
        if count is not None:
            ids = torch.where(torch.arange(ids.numel(), device=ids.device) < count, ids, self._some)
        owner = torch.searchsorted(self._ends, ids, right=True)
        row = ids - self._lows[owner]
        if self.in_reach:
            out = self.here.new_empty(1, ids.numel(), self._width)
            copy_rows_triton(out, *self._table, owner, row, 0, ids.numel())
            return out.view(ids.numel(), *self.here.shape[1:])
        out = self.here.new_empty(ids.numel(), *self.here.shape[1:])
        for rank, part in enumerate(self._parts):  # which may lie on another GPU
            at = (owner == rank).nonzero().squeeze(1)
            out[at] = part.index_select(0, row[at].to(part.device)).to(out.device)
        return out

    def _requested(self, ids: Tensor) -> Tensor:
        """Rows ``[M, ...]`` from their owners; all ranks request at the same time, some of them perhaps none."""
        ranks, device, ids = self._ranks, ids.device, ids.long().cpu()
        owner = torch.searchsorted(torch.tensor(self._bounds[1:]), ids, right=True)
        order = torch.sort(owner, stable=True).indices
        requests = torch.bincount(owner, minlength=ranks.ranks).tolist()
        requested = exchange(torch.tensor(requests), [1] * ranks.ranks, [1] * ranks.ranks, ranks).tolist()
        rows = exchange(ids[order], requests, requested, ranks) - self._bounds[ranks.rank]  # of this rank [A]
        received = exchange(self.here.index_select(0, rows.to(self.here.device)).cpu(), requested, requests, ranks)
        out = torch.empty_like(received)
        out[order] = received
        return out.to(device)

    def lists(self, indptr: Tensor) -> CachedLists:
        """The array as the lists between ``indptr``, for kernels: all of them are in reach."""
        return spread_lists(self._parts, self._bounds, indptr)


def exchange(values: Tensor, give: Sequence[int], get: Sequence[int], ranks: Ranks) -> Tensor:
    """Send ``give[q]`` rows of ``values`` to rank q, in order; what the others send here, ``get[q]`` rows of each."""
    received = values.new_empty((sum(get), *values.shape[1:]))
    with ranks.losses_named():
        dist.all_to_all_single(received, values.contiguous(), list(get), list(give))
    return received


# ---- The rows of a rank, and the graph that it trains on.
#
# Remote rows are copied in chunks, and summed chunk by chunk: more of them overlap more, and cut rows into more pieces.
CHUNK_ROWS, MOST_CHUNKS = 1 << 17, 4


@dataclass(frozen=True)
class ShardRows:
    """Own rows of a matrix over all nodes: CSR with global ``columns [E]``.

    ``first_edge``: where the edges begin among those of all ranks. ``exchange`` reads the remote rows.
    """

    indptr: Tensor
    columns: Tensor
    weight: Tensor | None
    first_edge: int
    exchange: Exchange
    low: int
    high: int

    @cached_property
    def indices(self) -> Tensor:
        """The columns of the block ``[E]`` int32."""
        return to_block(self.columns, self.exchange.halo.ids.to(self.columns.dtype), self.low, self.high)

    def rows(self) -> Tensor:
        """The global row of every edge ``[E]`` int64."""
        ids = torch.arange(self.low, self.high, device=self.columns.device)
        return torch.repeat_interleave(ids, self.indptr.diff().long(), output_size=self.columns.numel())

    def with_loops(self, keep: bool, gather: Callable[[Any], list[Any]]) -> ShardRows:
        """One more entry on the diagonal of every row.

        ``keep``: an existing loop stays as well; else it is replaced, and keeps its weight. All ranks call this.
        """
        rows, columns, weight = self.rows(), self.columns.long(), self.weight
        loops = torch.arange(self.low, self.high, device=columns.device)
        loop_weight = None if weight is None else weight.new_ones(loops.numel())
        if not keep:
            is_loop = rows == columns
            if weight is not None:
                loop_weight = loop_weights(rows[is_loop] - self.low, weight[is_loop], loops.numel())
                weight = weight[~is_loop]
            rows, columns = rows[~is_loop], columns[~is_loop]
        rows, columns = torch.cat([rows, loops]), torch.cat([columns, loops])
        order = torch.sort(rows * (int(columns.max()) + 1 if columns.numel() else 1) + columns, stable=True).indices
        if weight is not None and loop_weight is not None:
            weight = torch.cat([weight, loop_weight])[order]
        indptr = row_offsets(rows - self.low, loops.numel())
        edges = columns.numel()
        return replace(
            self,
            indptr=indptr.to(offset_dtype(edges)),
            columns=columns[order].to(self.columns.dtype),
            weight=weight,
            first_edge=sum(gather(edges)[: self.exchange.staging.rank]),
        )


class ShardedAdjacency(Adjacency):
    """The rows of one rank. ``forward`` and ``backward``: its rows of the matrix and of the transpose.

    ``row_scale`` and ``col_scale`` are ``[n]``, of own nodes; those of remote columns are read from their owners.
    All ranks have to make the same calls: whatever is derived or aggregated may exchange rows.
    """

    spans_ranks = True

    def __init__(
        self,
        forward: ShardRows,
        backward: ShardRows,
        gather: Callable[[Any], list[Any]],
        *,
        row_scale: Tensor | None = None,
        col_scale: Tensor | None = None,
        symmetric: bool = False,
    ) -> None:
        super().__init__(
            forward.indptr,
            forward.indices,
            forward.high - forward.low,
            weight=forward.weight,
            row_scale=row_scale,
            col_scale=col_scale,
            symmetric=symmetric,
        )
        self.forward, self.backward, self._gather = forward, backward, gather
        self.first_edge = forward.first_edge

    @classmethod
    def of(
        cls,
        adj: Adjacency,
        bounds: Sequence[int],
        staging: Staging,
        gather: Callable[[Any], list[Any]],
        device: torch.device | str = "cpu",
    ) -> ShardedAdjacency:
        """This rank's rows of the plain adjacency ``adj`` of a whole graph, which may lie on the host."""
        low, high = bounds[staging.rank], bounds[staging.rank + 1]

        def make(parts: tuple[Tensor, Tensor, Tensor | None, int]) -> ShardRows:
            indptr, columns, weight, first = parts
            columns = columns.to(device)
            exchange = Exchange(staging, make_halo(columns, bounds, staging.rank, gather), bounds)
            moved = None if weight is None else weight.to(device)
            return ShardRows(indptr.to(device), columns, moved, first, exchange, low, high)

        forward = make(own_rows(adj, low, high))
        backward = forward if adj.symmetric else make(own_rows_of_transpose(adj, low, high))
        return cls(forward, backward, gather, symmetric=adj.symmetric)

    def __repr__(self) -> str:
        remote = self.forward.exchange.halo.size
        return f"ShardedAdjacency({self.num_rows} own and {remote} remote nodes, {self.num_edges} edges, {self.device})"

    def to(self, device: torch.device | str) -> ShardedAdjacency:
        """Itself: a shard is made on the device of its rank."""
        if torch.empty(0, device=device).device != self.device:
            raise InputError(f"a shard stays on the device of its rank, {self.device}; it cannot move to {device}")
        return self

    @property
    def launch(self) -> ShardedLaunch:
        """The launch of the kernel on a GPU."""
        return self.forward.exchange.staging.launch

    # ---- derived matrices ------------------------------------------------------------------------------

    def _like(self, forward: ShardRows, backward: ShardRows, **scales: Tensor | None) -> ShardedAdjacency:
        other = ShardedAdjacency(forward, backward, self._gather, symmetric=self.symmetric, **scales)
        other.nodes = self.nodes
        return other

    def scaled(
        self, *, weight: Tensor | None = None, row_scale: Tensor | None = None, col_scale: Tensor | None = None
    ) -> ShardedAdjacency:
        """The same structure with other factors; weights are its own or none."""
        if weight is not None and weight is not self.weight:
            raise InputError("a sharded adjacency keeps its edge weights: scale rows and columns instead")
        forward, backward = self.forward, self.backward
        if weight is None and self.weight is not None:
            forward = replace(forward, weight=None)
            backward = forward if self.symmetric else replace(backward, weight=None)
        return self._like(forward, backward, row_scale=row_scale, col_scale=col_scale)

    def transposed(self) -> ShardedAdjacency:
        """This rank's rows of the transpose."""
        scales = {"row_scale": self.col_scale, "col_scale": self.row_scale}
        return self.derived("transposed", lambda: self._like(self.backward, self.forward, **scales))

    def _with_loops(self, keep: bool) -> ShardedAdjacency:
        forward = self.forward.with_loops(keep, self._gather)
        return self._like(forward, forward if self.symmetric else self.backward.with_loops(keep, self._gather))

    def _add_self_loops(self) -> ShardedAdjacency:
        return self._with_loops(keep=False)

    def plus_identity(self) -> ShardedAdjacency:
        """``A + I``: every row gains an entry, also one with a self loop."""
        return self._with_loops(keep=True)

    def _normalise_gcn(self) -> ShardedAdjacency:
        looped = self.with_self_loops()
        scale = looped.inverse_root_degrees()
        return looped.scaled(weight=looped.weight, row_scale=scale, col_scale=scale)

    def block(self) -> Adjacency:
        """The plain matrix of n rows and n + h columns behind it."""

        def build() -> Adjacency:
            exchange, col_scale = self.forward.exchange, self.col_scale
            if col_scale is not None:
                col_scale = torch.cat([col_scale, exchange.get(col_scale[:, None]).squeeze(-1)])
            columns, factors = self.num_rows + exchange.halo.size, {"weight": self.weight, "row_scale": self.row_scale}
            return Adjacency(self.indptr, self.indices, columns, col_scale=col_scale, **factors)

        return self.derived("block", build)

    def make_relation_slots(self) -> RelationSlots:
        """The slots of own rows, whose means read remote rows."""
        slots = make_relation_slots(self.block().related(self.relation, self.num_relations))
        return replace(slots, means=ExtendedRows(slots.means, self.forward.exchange))

    # ---- aggregations ----------------------------------------------------------------------------------

    def _check(self, what: str, rows: int) -> None:
        if rows != self.num_rows:
            raise InputError(f"{what}: x has {rows} rows, this rank has {self.num_rows} nodes; they must agree")

    def spmm(self, x: Tensor, weight: Tensor | None = None, reduce: str = "sum") -> Tensor:
        """See :func:`weft.ops.spmm`; ``x [..., n, F]`` to ``[..., n, F]``."""
        self._check("spmm", x.shape[-2])
        if reduce == "max":
            return self.spmm_max(x)
        if reduce not in ("sum", "mean"):
            raise InputError(f"spmm: reduce={reduce!r} must be 'sum', 'mean' or 'max'")
        adj = self.mean() if reduce == "mean" else self
        if weight is not None:
            return ops.spmm(adj.block(), adj.forward.exchange.extend(x), weight)
        return Collective.apply(x, adj.aggregate, lambda grad: adj.transposed().spmm(grad))  # both read remote rows

    def aggregate(self, x: Tensor) -> Tensor:
        """``A x`` without a gradient: own rows are published, remote ones read.

        On a GPU kernels may read remote rows where they lie, while others sum local ones; else they are copied first.
        """
        with torch.no_grad():
            block, exchange = self.block(), self.forward.exchange
            if not exchange.is_needed:
                return ops.spmm(block, x)
            peers = exchange.peers(x)
            in_place = self.launch.way != "fetched" and use_triton(x)
            if not in_place or any(peer.device != x.device for peer in peers):
                return ops.spmm(block, torch.cat([x, exchange.take(peers)], -2))
            if self.launch.way == "tiles":
                tiles = self.derived("tiles", lambda: tiled_csr(*self._split, self._factors()))
                return streamed_spmm_triton(x, peers, tiles, self.row_scale)
            table, counts = address_table(peers, x.device)
            schedule = "interleaved" if self.launch.way == "interleaved" else "pipelined"
            return sharded_spmm_triton(x, table, counts, self._csr(), self.row_scale, self.launch, schedule)

    def _csr(self) -> ShardedCSR:
        ps, chunks = self.launch.ps, min(MOST_CHUNKS, max(1, self.forward.exchange.halo.size // CHUNK_ROWS))
        return self.derived(("csr", ps), lambda: shard_csr(*self._split, ps, self._factors(), chunks))

    @property
    def _split(self) -> tuple[Tensor, Tensor, Sequence[int], int]:
        """Own rows with global columns, the nodes of the ranks, and which rank this is."""
        exchange = self.forward.exchange
        return self.forward.indptr, self.forward.columns, exchange.bounds, exchange.staging.rank

    def _factors(self) -> Tensor | None:
        """Factors of the edges, with those of their columns."""
        scale = self.block().col_scale
        if scale is None:
            return self.weight
        factors = scale[self.indices.long()]
        return factors if self.weight is None else factors * self.weight

    def sddmm(self, a: Tensor, b: Tensor, heads: int = 1) -> Tensor:
        """See :func:`weft.ops.sddmm`: ``a`` and ``b [..., n, heads*D]`` to ``[..., E, heads]`` of own edges."""
        self._check("sddmm", b.shape[-2])
        return ops.sddmm(self.block(), a, self.forward.exchange.extend(b), heads)

    def spmm_max(self, x: Tensor) -> Tensor:
        """The maximum over in-edges, as :func:`weft.ops.spmm` has it."""
        self._check("spmm_max", x.shape[-2])
        return ops.spmm(self.block(), self.forward.exchange.extend(x), reduce="max")

    def graph_attention(
        self, x: Tensor, a_src: Tensor, a_dst: Tensor, slope: float = 0.2, *drop: Any, **named: Any
    ) -> Tensor:
        """See :func:`weft.ops.graph_attention`; the rows and the source scores are exchanged as one matrix."""
        self._check("graph_attention", x.shape[-3])
        heads, width = x.shape[-2:]
        whole = self.forward.exchange.extend(torch.cat([x.flatten(-2), a_src], -1))
        x_all, a_all = whole.split([heads * width, heads], -1)
        x_all, block = x_all.unflatten(-1, (heads, width)), self.block()
        mask = self._mask(heads, x.device, *drop, **named)
        if mask is None:
            return ops.graph_attention(block, x_all.contiguous(), a_all.contiguous(), a_dst.contiguous(), slope)
        return attention_torch(x_all, a_all, a_dst, slope, mask, unpack_csr(pack_csr(block, rows=True)))

    def graph_attention_packed(self, packed: Tensor, heads: int, *others: Any, **named: Any) -> Tensor:
        """See :func:`weft.ops.graph_attention_packed`."""
        return self.graph_attention(*take_apart(packed, heads), *others, **named)

    def graph_attention_v2(
        self, x_src: Tensor, x_dst: Tensor, att: Tensor, slope: float = 0.2, *drop: Any, **named: Any
    ) -> Tensor:
        """See :func:`weft.ops.graph_attention_v2`."""
        self._check("graph_attention_v2", x_src.shape[-3])
        heads, width = x_src.shape[-2:]
        whole = self.forward.exchange.extend(x_src.flatten(-2)).unflatten(-1, (heads, width))
        mask, block = self._mask(heads, x_src.device, *drop, **named), self.block()
        if mask is None:
            return ops.graph_attention_v2(block, whole.contiguous(), x_dst.contiguous(), att, slope)
        return attention_v2_torch(whole, x_dst, att, slope, mask, unpack_csr(pack_csr(block, rows=True)))

    def _mask(
        self,
        heads: int,
        device: torch.device,
        dropout: float | Tensor = 0.0,
        clock: Tensor | None = None,
        site: int = 0,
    ) -> Tensor | None:
        """The mask of this rank's edges, as a run on one rank has it. The fused kernels count edges from 0."""
        rate, clock = rate_and_clock(dropout, clock, device)
        return coefficient_mask(rate, clock, site, self.num_edges, heads, self.first_edge)


class ExtendedRows(Adjacency):
    """A plain matrix over own and remote nodes that takes own rows alone: it reads those of remote nodes."""

    def __init__(self, plain: Adjacency, exchange: Exchange) -> None:
        super().__init__(plain.indptr, plain.indices, plain.num_cols, row_scale=plain.row_scale)
        self._plain, self._exchange = plain, exchange

    def mean(self) -> ExtendedRows:
        """The mean over rows."""
        return self.derived("mean", lambda: ExtendedRows(self._plain.mean(), self._exchange))

    def spmm(self, x: Tensor, weight: Tensor | None = None, reduce: str = "sum") -> Tensor:
        """See :func:`weft.ops.spmm`; ``x [..., n, F]``."""
        return ops.spmm(self._plain, self._exchange.extend(x), weight, reduce)


@dataclass(frozen=True)
class SpreadGraph:
    """A graph as every rank reads it for sampling: row offsets ``indptr [N+1]`` here, the rest with its owners.

    ``columns``, ``weight`` and ``relation`` are over edges, ``x`` (None if sparse) and ``y`` over nodes. ``bounds``:
    nodes of the ranks.
    """

    bounds: tuple[int, ...]
    indptr: Tensor
    columns: Spread
    weight: Spread | None
    relation: Spread | None
    x: Spread | None
    y: Spread


class ShardGraph(Graph):
    """Rows ``bounds[rank]`` to ``bounds[rank + 1]`` of ``whole`` on the rank's device; ids of splits are local.

    It may have no nodes at all. ``stats()`` is the summary of the whole graph; ``first_row``: the global id of its
    first node.
    """

    def __init__(self, whole: Graph, bounds: Sequence[int], ranks: Ranks) -> None:
        device, low, high = ranks.device, bounds[ranks.rank], bounds[ranks.rank + 1]
        adj = ShardedAdjacency.of(whole.adj, bounds, ranks.staging, ranks.gather_objects, device)

        def own(split: Split) -> Split:
            return Split(*((part[(part >= low) & (part < high)] - low).to(device) for part in split))

        several = [whole.split_rows(number) for number in range(whole.num_splits)]
        self._num_train = [split.train.numel() for split in several]  # of all ranks
        x = whole.x
        if isinstance(x, SparseFeatures):
            indptr, indices, weight, first = own_rows(x.matrix, low, high)
            matrix = Adjacency(indptr.to(device), indices.to(device), x.matrix.num_cols, weight=weight.to(device))
            matrix.first_edge = first
            x = SparseFeatures(matrix)
        elif x is not None:
            x = x[low:high].to(device)
        y = None if whole.y is None else whole.y[low:high].to(device)
        of_edges = slice(adj.first_edge, adj.first_edge + adj.num_edges)
        relation = None if whole.relation is None else whole.relation[of_edges].to(device)
        adj = adj if whole.edge_attr is None else adj.attributed(whole.edge_attr[of_edges].to(device))
        super().__init__(
            adj,
            x,
            y,
            *own(several[0]),
            relation=relation,
            name=whole.name,
            num_classes=whole.num_classes,
            num_relations=whole.num_relations,
            several=[own(split) for split in several] if len(several) > 1 else (),
            numbers=whole.regression,
        )
        self._stats, self._ranks, self.first_row = whole.stats(), ranks, low
        self.divided_otherwise = partial(ShardGraph, whole, divided_otherwise(bounds), ranks)  # all ranks call it

    def _check_shapes(self) -> None:
        """Nothing: the whole graph has been checked, and a shard may be empty."""

    def to(self, device: torch.device | str) -> ShardGraph:
        """Itself: it was made on the device of its rank."""
        self.adj.to(device)
        return self

    def split(self, number: int) -> ShardGraph:
        """The same rows with one of the splits."""
        chosen = copy(self)
        chosen.train, chosen.val, chosen.test = self.split_rows(number)
        chosen._several, chosen._num_train = (), [self._num_train[number]]
        chosen.divided_otherwise = lambda: self.divided_otherwise().split(number)
        return chosen

    def train_share(self, number: int = 0) -> float:
        """The share of the training nodes of a split that this rank has."""
        return self.split_rows(number).train.numel() / max(self._num_train[number if self._several else 0], 1)

    @cached_property
    def spread(self) -> SpreadGraph:
        """The graph where peers read it; all ranks make it together. Features of this rank lie there from then on."""
        rows, ranks = self.adj.forward, self._ranks
        degrees = torch.cat(ranks.gather_objects(rows.indptr.diff().cpu())).to(self.device)
        indptr = torch.zeros(degrees.numel() + 1, dtype=torch.int64, device=self.device)
        torch.cumsum(degrees, 0, out=indptr[1:])
        bounds = rows.exchange.bounds
        edges = indptr[list(bounds)].tolist()

        def of_edges(values: Tensor | None) -> Spread | None:
            return None if values is None else Spread(values, edges, ranks)

        x = Spread(self.x, bounds, ranks) if isinstance(self.x, Tensor) else None
        self.x = self.x if x is None else x.here
        columns, y = Spread(rows.columns, edges, ranks), Spread(self.y, bounds, ranks)
        indptr = indptr.to(offset_dtype(edges[-1]))
        return SpreadGraph(bounds, indptr, columns, of_edges(rows.weight), of_edges(self.relation), x, y)
