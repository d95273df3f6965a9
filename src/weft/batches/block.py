"""Block: the sampled edges of one hop as a rectangular CSR.

Rows are destinations, columns are sources, and the destinations are the first ``num_dst`` of the sources. Columns of a
row are in the order in which they were picked, not sorted.

Shapes: D destinations, M sources, P edges, N nodes of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.ops.csr.adjacency import Adjacency, loop_weights, row_sums
from weft.ops.csr.relation_slots import RelationSlots, as_matrices, slot_arrays
from weft.ops.csr.worklist import WorkList
from weft.ops.sampling.cpu import transpose_cpu


class OfTensors:
    """Methods of frozen dataclasses whose fields are tensors, tuples of such dataclasses, or other values."""

    def tensors(self) -> list[Tensor]:
        """Every array."""
        values = [getattr(self, name) for name in self.__dataclass_fields__]
        parts = [part for value in values if isinstance(value, tuple) for part in value]
        return [value for value in values if isinstance(value, Tensor)] + [t for part in parts for t in part.tensors()]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Any:
        """The same on another device."""

        def moved(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(part.to(device, non_blocking) for part in value)
            return value.to(device, non_blocking=non_blocking) if isinstance(value, Tensor) else value

        return replace(self, **{name: moved(getattr(self, name)) for name in self.__dataclass_fields__})


@dataclass(frozen=True)
class Block(OfTensors):
    """One hop of a batch.

    ``indptr [D+1]`` and ``indices [P]`` int32 (positions among the sources), ``num_src`` = M.
    ``edges [P]`` int64: where each edge is in the graph's CSR, or None. ``weight [P]`` and ``relation [P]``: those of
    the graph at these edges, or None; ``num_relations`` are those of the graph.

    ``gcn_scale [M]`` and ``degree [D]`` select how GCN normalises. Without them (the default) degrees count the sampled
    edges of the block and the added loop, as PyG's layers do on what ``NeighborLoader`` returns. With them,
    ``gcn_scale`` is ``D^-1/2`` of the full graph at the sources and ``degree`` the full in-degree of the destinations:
    each sampled edge is weighted by ``degree / picked``, which makes a row's sum an unbiased estimate of the full one.
    In both, an edge from a node to itself takes the place of the added loop, and keeps its weight.
    """

    indptr: Tensor
    indices: Tensor
    num_src: int
    edges: Tensor | None = None
    weight: Tensor | None = None
    relation: Tensor | None = None
    gcn_scale: Tensor | None = None
    degree: Tensor | None = None
    num_relations: int = 0

    @property
    def num_dst(self) -> int:
        """Number of destinations D."""
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        """Number of sampled edges P."""
        return self.indices.numel()

    def adjacency(self) -> Adjacency:
        """The block as layers take it: a new :class:`Adjacency` of D rows and M columns."""
        plain = BlockAdjacency(
            self.indptr,
            self.indices,
            self.num_src,
            weight=self.weight,
            full=None if self.gcn_scale is None else (self.gcn_scale, self.degree),
        )
        return plain if self.relation is None else plain.related(self.relation, self.num_relations)


class CountingSorted(Adjacency):
    """A matrix that serves one step: on the CPU its transpose is a counting sort, on a GPU torch's stable sort.

    Both give the same order.
    """

    def _counting_sort(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.derived("counting sort", lambda: transpose_cpu(self.indptr, self.indices, self.num_cols))

    def _sort_by_source(self) -> Tensor:
        if self.device.type != "cpu":
            return super()._sort_by_source()
        return self._counting_sort()[2]

    def _transposed_arrays(self) -> tuple[Tensor, Tensor]:
        if self.device.type != "cpu":
            return super()._transposed_arrays()
        indptr, rows, _ = self._counting_sort()
        return indptr, rows


class BlockAdjacency(CountingSorted):
    """An adjacency whose rows are the first of its columns and whose rows are not sorted.

    ``full`` is ``(gcn_scale [M], degree [D])`` for GCN's normalisation by the full graph.
    """

    def __init__(self, *arrays: Any, full: tuple[Tensor, Tensor] | None = None, **factors: Any) -> None:
        super().__init__(*arrays, **factors)
        self._full = full

    def scaled(self, **factors: Tensor | None) -> Adjacency:
        """The same structure with other factors."""
        other = BlockAdjacency(self.indptr, self.indices, self.num_cols, perm=self.perm, full=self._full, **factors)
        other._structure, other.nodes = self.structure, self.nodes
        return other

    def _add_self_loops(self) -> Adjacency:
        """Every row begins with its loop: of weight 1, or of that of the loop that was sampled."""
        rows, cols, weight = self.rows(), self.indices, self.weight
        regular = rows != cols
        loop_weight = None if weight is None else weight.new_ones(self.num_rows)
        if not bool(regular.all()):
            if loop_weight is not None:
                loop_weight = loop_weights(rows[~regular], weight[~regular], self.num_rows)
            rows, cols, weight = rows[regular], cols[regular], None if weight is None else weight[regular]
        counts = torch.bincount(rows, minlength=self.num_rows) + 1
        indptr = torch.zeros(self.num_rows + 1, dtype=torch.int32, device=self.device)
        torch.cumsum(counts, 0, out=indptr[1:])
        ids = torch.arange(self.num_rows, dtype=cols.dtype, device=self.device)
        indices = torch.repeat_interleave(ids, counts, output_size=cols.numel() + self.num_rows)
        position = torch.arange(1, cols.numel() + 1, device=self.device) + rows
        indices[position] = cols
        weights = None
        if weight is not None and loop_weight is not None:
            weights = weight.new_empty(indices.numel()).index_copy_(0, position, weight)
            weights.index_copy_(0, indptr[:-1].long(), loop_weight)
        looped = BlockAdjacency(indptr, indices, self.num_cols, weight=weights, full=self._full)
        looped.nodes = self.nodes
        return looped

    def _normalise_gcn(self) -> Adjacency:
        looped = self.with_self_loops()
        if self._full is None:  # D counts the edges of the block and one loop per node
            degree, weight = torch.ones(looped.num_cols, device=looped.device), looped.weight
            if weight is None:
                degree[: self.num_rows] = looped.degrees().to(torch.float32)
            else:
                degree[: self.num_rows] = row_sums(weight.to(torch.float32), looped.indptr)
            scale = degree.rsqrt()
            scale = torch.where(torch.isinf(scale), torch.zeros_like(scale), scale)
        else:  # sampled edges times full degree over picked, loops as they are
            scale, degree = self._full
            rows = looped.rows().long()
            ratio = (degree.to(torch.float32) / self.degrees().clamp(min=1))[rows]
            weight = torch.where(rows == looped.indices, torch.ones_like(ratio), ratio)
            weight = weight if looped.weight is None else weight * looped.weight
        return looped.scaled(weight=weight, row_scale=scale[: self.num_rows], col_scale=scale)


# ---- What a sampler returns: a batch of blocks, or the local subgraph of a batch.
#
# Shapes: S seeds, M nodes of the batch, P edges, F features.


@dataclass(frozen=True)
class MiniBatch(OfTensors):
    """The blocks of one batch, the outermost hop first, so that layer i uses ``blocks[i]``.

    ``input_nodes [M]`` int32 are the sources of ``blocks[0]`` and begin with ``seeds [S]``, in their order.
    ``x [M, F]`` are the input nodes' features and ``y [S]`` the seeds' labels, once a stage has fetched them.
    """

    blocks: tuple[Block, ...]
    input_nodes: Tensor
    seeds: Tensor
    epoch: int = 0
    batch: int = 0
    x: Tensor | None = None
    y: Tensor | None = None

    def with_data(self, x: Tensor | None = None, y: Tensor | None = None) -> MiniBatch:
        """The same batch with features and labels."""
        return replace(self, x=x, y=y)


@dataclass(frozen=True)
class Subgraph(OfTensors):
    """The sampled edges of a batch as one local edge list, as PyG's ``NeighborLoader`` gives it.

    ``edge_index [2, P]`` int64 holds sources above destinations as positions in ``nodes [M]`` int32, which begin with
    the ``num_seeds`` seeds. ``edges [P]`` int64: where each edge is in the graph's CSR, or None. ``weight [P]``,
    ``relation [P]`` and ``edge_attr [P, ...]``: those of the graph at these edges, or None. ``by_hop``: how many nodes
    and edges every hop added, seeds outwards.
    """

    edge_index: Tensor
    nodes: Tensor
    num_seeds: int
    edges: Tensor | None = None
    weight: Tensor | None = None
    relation: Tensor | None = None
    epoch: int = 0
    batch: int = 0
    x: Tensor | None = None
    y: Tensor | None = None
    num_relations: int = 0
    edge_attr: Tensor | None = None
    by_hop: list[tuple[int, int]] | None = None

    @property
    def input_nodes(self) -> Tensor:
        """The nodes whose features are needed: all of them."""
        return self.nodes

    @property
    def seeds(self) -> Tensor:
        """The seeds ``[S]``."""
        return self.nodes[: self.num_seeds]

    def leading_to(self, first: int, last: int) -> Subgraph:
        """The part that the seeds ``first`` to ``last`` (exclusive) depend on; they are its seeds.

        It has every node that a path leads from to one of them, with all of its in-edges: in a model whose rows depend
        on their in-neighbours alone, these seeds have the numbers of the whole, whatever its depth. Without seeds it is
        the part of the first node, since modules may need a row.
        """
        src, dst = self.edge_index
        needed = torch.zeros(self.nodes.numel(), dtype=torch.bool, device=src.device)
        needed[first:last] = True
        needed[0] |= first == last
        before = 0
        while (count := int(needed.sum())) > before:
            before = count
            needed[src[needed[dst]]] = True
        seeds = torch.arange(first, last, device=src.device)
        nodes = torch.cat([seeds, needed.index_fill(0, seeds, False).nonzero().squeeze(1)])
        local = torch.zeros_like(needed, dtype=torch.int64)
        local[nodes] = torch.arange(nodes.numel(), device=src.device)
        picked, values = needed[dst], {"edges": self.edges, "weight": self.weight, "relation": self.relation}
        values = {name: None if value is None else value[picked] for name, value in values.items()}
        edge_index = local[self.edge_index[:, picked]]
        return replace(self, edge_index=edge_index, nodes=self.nodes[nodes], num_seeds=last - first, **values)

    def with_data(self, x: Tensor | None = None, y: Tensor | None = None) -> Subgraph:
        """The same subgraph with features ``[M, F]`` and labels."""
        return replace(self, x=x, y=y)


# ---- PaddedAdjacency: a sampled block padded to its capacity, built without reading a size back.
#
# Everything that a training step derives from it (work lists, transposes, self loops, GCN's factors) has a shape that
# depends on the capacity alone and is made on the device: sampling and training can be captured as one CUDA graph. Rows
# beyond the existing ones have no edges; entries beyond ``indptr[-1]`` are never read.
#
# Shapes: N rows, M columns, P entries, all of them capacities.

Full = tuple[Tensor, Tensor] | Callable[[], tuple[Tensor, Tensor]]


class PaddedAdjacency(Adjacency):
    """``indptr [N+1]``, ``indices [P]`` int32; the destinations are the first N of the M sources.

    ``full``: ``(gcn_scale [M], degree [N])`` of the whole graph for GCN, or a function that gives them when they are
    needed. Assumes that no edge is a self loop.
    """

    def __init__(self, *arrays: Any, full: Full | None = None, **factors: Any) -> None:
        super().__init__(*arrays, **factors)
        self._full = full
        # Every row is a light piece, in order: fan-outs bound the rows, and sorting them would need their sizes.
        none = torch.empty(0, dtype=torch.int32, device=self.device)
        self._derived["worklist"] = WorkList(
            heavy_start=none.to(self.indptr.dtype),
            heavy_len=none,
            heavy_row=none,
            light_start=self.indptr[:-1].contiguous(),
            light_len=self.indptr.diff().to(torch.int32),
            light_row=torch.arange(self.num_rows, dtype=torch.int32, device=self.device),
            hub_row=none,
            hub_ptr=torch.zeros(1, dtype=torch.int32, device=self.device),
            hub_of_partial=none,
        )

    def scaled(self, **factors: Tensor | None) -> Adjacency:
        """The same structure with other factors."""
        other = PaddedAdjacency.__new__(PaddedAdjacency)
        Adjacency.__init__(other, self.indptr, self.indices, self.num_cols, perm=self.perm, **factors)
        other._full, other._structure, other.nodes = self._full, self.structure, self.nodes
        return other

    def rows(self) -> Tensor:
        """Destination of every entry ``[P]`` int32; N - 1 for those beyond the last."""

        def build() -> Tensor:
            positions = torch.arange(self.num_edges, device=self.device, dtype=self.indptr.dtype)
            rows = torch.searchsorted(self.indptr[1:].contiguous(), positions, right=True)
            return rows.clamp_(max=self.num_rows - 1).to(torch.int32)

        return self.structure.derived("rows", build)

    def _transpose(self) -> Adjacency:
        base = self.structure
        indptr, indices, perm = base.derived("transposed arrays", base._transposed_padded)
        factors = {"row_scale": self.col_scale, "col_scale": self.row_scale}
        weight = None if self.weight is None else self.weight.index_select(-1, perm)
        back = PaddedAdjacency(indptr, indices, self.num_rows, weight=weight, perm=perm.to(torch.int32), **factors)
        back._structure = base.derived("transposed structure", lambda: back)
        return back

    def _transposed_padded(self) -> tuple[Tensor, Tensor, Tensor]:
        positions = torch.arange(self.num_edges, device=self.device)
        column = torch.where(positions < self.indptr[-1], self.indices.long(), self.num_cols)
        column, perm = torch.sort(column, stable=True)
        starts = torch.arange(self.num_cols + 1, device=self.device)
        indptr = torch.searchsorted(column, starts).to(torch.int32)
        return indptr, self.rows().index_select(0, perm), perm

    def _add_self_loops(self) -> Adjacency:
        """Every row begins with its loop."""
        count, rows = self.num_rows, self.rows().long()
        indptr = self.indptr + torch.arange(count + 1, dtype=self.indptr.dtype, device=self.device)
        positions = torch.arange(self.num_edges, device=self.device) + rows + 1
        indices = self.indices.new_zeros(self.num_edges + count)
        indices.index_copy_(0, positions, self.indices)
        loops = torch.arange(count, dtype=self.indices.dtype, device=self.device)
        indices.index_copy_(0, indptr[:-1].long(), loops)
        weight = None
        if self.weight is not None:
            weight = self.weight.new_ones(self.num_edges + count).index_copy_(0, positions, self.weight)
        return PaddedAdjacency(indptr, indices, self.num_cols, weight=weight, full=self._full)

    def make_relation_slots(self) -> RelationSlots:
        """Slots for as many (relation, node) pairs as there can be."""
        pairs = max(min(self.num_edges, self.num_rows * self.num_relations), 1)
        return as_matrices(slot_arrays(self, pairs, self.indptr[-1:]), self, PaddedAdjacency)

    def with_identity(self) -> Adjacency:
        """``A + I`` without weights."""
        return self.scaled().with_self_loops()

    def _normalise_gcn(self) -> Adjacency:
        assert self._full is not None, "GCN's factors are those of the whole graph"
        looped, (scale, degree) = self.with_self_loops(), self._full() if callable(self._full) else self._full
        rows = looped.rows().long()
        ratio = degree.to(torch.float32) / self.degrees().clamp(min=1)
        weight = torch.where(rows == looped.indices, 1.0, ratio.index_select(0, rows))
        if looped.weight is not None:
            weight = weight * looped.weight
        return looped.scaled(weight=weight, row_scale=scale[: self.num_rows], col_scale=scale)


# ---- Batches of PyG's ``NeighborLoader`` as subgraphs. PyG is not imported: a batch is known by its attributes.
#
# Shapes: M nodes of a batch, S seeds, P edges.


def from_pyg(batch: Any) -> Subgraph:
    """The local subgraph of a PyG batch.

    It has ``n_id [M]`` (the graph's node ids, seeds first), ``edge_index [2, P]`` (places in ``n_id``) and
    ``batch_size`` (or ``input_id [S]``); ``edge_weight [P]``, ``edge_type [P]``, ``edge_attr [P, ...]``, ``x [M, F]``
    and ``y [M]`` are taken over if it has them.
    """
    if hasattr(batch, "node_types"):
        raise InputError(
            "a batch of HeteroData has several kinds of nodes; convert the data with to_homogeneous() first"
        )
    nodes, edges = _tensor(batch, "n_id"), _tensor(batch, "edge_index")
    if nodes.dim() != 1 or edges.dim() != 2 or edges.shape[0] != 2:
        raise InputError(
            f"n_id must be [nodes] and edge_index [2, edges], not {list(nodes.shape)} and {list(edges.shape)}"
        )
    count = nodes.numel()
    low, high = (int(end) for end in torch.aminmax(edges)) if edges.numel() else (0, -1)
    if low < 0 or high >= count:
        raise InputError(f"edge_index has {low if low < 0 else high}, which is no place in n_id of {count} nodes")
    seeds = getattr(batch, "batch_size", None)
    if seeds is None and isinstance(ids := getattr(batch, "input_id", None), Tensor):
        seeds = ids.numel()
    if not isinstance(seeds, int) or not 1 <= seeds <= count:
        raise InputError(f"batch_size={seeds!r} must say how many of the {count} nodes in n_id are seeds")
    attr = _per(batch, "edge_attr", edges.shape[1], "edge")
    relation = _per(batch, "edge_type", edges.shape[1], "edge")
    return Subgraph(
        edges.long(),
        nodes.to(torch.int32),
        seeds,
        weight=_per(batch, "edge_weight", edges.shape[1], "edge"),
        relation=None if relation is None else relation.to(torch.int32),
        edge_attr=None if attr is None else attr.to(torch.float32),
        x=_per(batch, "x", count, "node"),
        y=_per(batch, "y", count, "node"),
    )


def _tensor(batch: Any, name: str) -> Tensor:
    value = getattr(batch, name, None)
    if not isinstance(value, Tensor) or value.is_floating_point():
        what = "is missing" if value is None else f"is {type(value).__name__}, not a tensor of integers"
        raise InputError(
            f"{name} of a {type(batch).__name__} {what}; batches of PyG's NeighborLoader have n_id and edge_index"
        )
    return value


def _per(batch: Any, name: str, count: int, what: str) -> Tensor | None:
    value = getattr(batch, name, None)
    if value is not None and (not isinstance(value, Tensor) or value.shape[0] != count):
        size = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"{name} of the batch is {size}; it must have one row per {what}, {count}")
    return value


def exact_device(device: torch.device | str) -> torch.device:
    """``"cuda"`` as the current GPU, such as ``cuda:0``; others as they are."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


# ---- The local subgraph of a batch as a matrix; on a CPU every sort of its edges is a counting sort.
#
# Shapes: M nodes of a batch, P edges.


class LocalAdjacency(CountingSorted):
    """A square matrix over the nodes of a batch."""

    def _add_self_loops(self) -> Adjacency:
        looped = super()._add_self_loops()
        again = LocalAdjacency(looped.indptr, looped.indices, looped.num_cols, weight=looped.weight)
        again.nodes = looped.nodes
        return again


def local_adjacency(local: Subgraph) -> Adjacency:
    """The sampled edges as a square matrix over ``nodes``, rows in their order, columns of a row ascending."""
    (src, dst), count = local.edge_index, local.nodes.numel()
    if dst.device.type == "cpu":  # a stable sort of the edges by their destinations, then by their sources
        _, order = _by_counting(src, count)
        indptr, again = _by_counting(dst[order], count)
        order = order[again]
    else:
        indptr = torch.zeros(count + 1, dtype=torch.int32, device=dst.device)
        torch.cumsum(torch.bincount(dst, minlength=count), 0, out=indptr[1:])
        order = torch.sort(dst * count + src, stable=True).indices
    weight = None if local.weight is None else local.weight[order]
    adj = LocalAdjacency(indptr, src[order].to(torch.int32), count, weight=weight)
    adj = adj if local.relation is None else adj.related(local.relation[order], local.num_relations)
    return adj if local.edge_attr is None else adj.attributed(local.edge_attr[order])


def _by_counting(ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """``(indptr [M+1], order [P])``: every edge is a row of one entry, and their transpose has equal ids together."""
    alone = torch.arange(ids.numel() + 1, dtype=torch.int32)
    indptr, order, _ = transpose_cpu(alone, ids.to(torch.int32), count)
    return indptr, order.long()
