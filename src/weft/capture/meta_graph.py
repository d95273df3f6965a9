"""Build a graph without data: arrays of the right sizes on the ``meta`` device, from a summary.

Everything derived from it (self loops, transposes, work lists) is derived by the code that does so on a device, except
sizes that depend on the data: those come from the summary's degree histogram.

Shapes: N nodes, E edges, F features, Z stored values of sparse features, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import GraphError
from weft.core.graph_stats import GraphStats
from weft.core.placement import DataPlacement
from weft.graph.graph import Graph
from weft.graph.sparse_features import SparseFeatures
from weft.nn.conv import relation_of_edges, without_weights
from weft.ops.csr.adjacency import Adjacency, insert_loops, offset_dtype
from weft.ops.csr.relation_slots import RelationSlots, pair_keys, slot_arrays
from weft.ops.csr.worklist import WorkList, thresholds

META = torch.device("meta")
FEW_EDGES = 1 << 26  # degrees of so many edges are counted in well under a second


@dataclass(frozen=True)
class Degrees:
    """Degree histogram as ``(degree, rows)`` pairs: enough to size a work list."""

    counts: tuple[tuple[float, int], ...]

    @classmethod
    def from_histogram(cls, stats: GraphStats) -> Degrees:
        """From a summary: every bin at one degree, chosen so that the edges add up.

        Without a histogram every row has the mean degree.
        """
        if not stats.degree_histogram:
            return cls.even(stats.num_nodes, stats.num_edges)
        bins = []  # (lowest, highest and middle degree, rows)
        for bits, rows in enumerate(stats.degree_histogram):
            low, high = (1 << bits) >> 1, (1 << bits) - 1
            if rows:
                bins.append((low, max(high, 0), (low + max(low, min(high, stats.max_degree or high))) / 2, rows))
        edges = sum(middle * rows for *_, middle, rows in bins)
        scale = stats.num_edges / edges if edges else 1.0
        # Clamped to its bin: which rows are light and which are hubs is exact.
        return cls(tuple((min(max(middle * scale, low), high), rows) for low, high, middle, rows in bins))

    @classmethod
    def even(cls, rows: int, edges: int) -> Degrees:
        """Every row with the same share of the edges."""
        return cls(((edges / max(rows, 1), rows),))

    @classmethod
    def counted(cls, degrees: Tensor) -> Degrees:
        """From the real degree of every row ``[N]``."""
        rows = torch.bincount(degrees)
        degree = rows.nonzero().squeeze(1)
        return cls(tuple(zip(degree.tolist(), rows[degree].tolist(), strict=True)))

    def with_loops(self) -> Degrees:
        """Every row one longer."""
        return Degrees(tuple((degree + 1, rows) for degree, rows in self.counts))

    def pieces(self, light: int, chunk: int) -> tuple[int, int, int, int]:
        """Rows that are light, rows of one piece, hubs, and pieces of hubs."""
        small = sum(rows for degree, rows in self.counts if degree <= light)
        single = sum(rows for degree, rows in self.counts if light < degree <= chunk)
        hubs = [(degree, rows) for degree, rows in self.counts if degree > chunk]
        partials = sum(rows * -int(-degree // chunk) for degree, rows in hubs)
        return small, single, sum(rows for _, rows in hubs), partials


class MetaAdjacency(Adjacency):
    """An adjacency without data. ``histograms`` of the degrees of its rows and of its columns stand in for the data.

    ``relation_rows`` and ``relation_edges`` do for relations.
    """

    relation_rows = 0
    relation_edges: tuple[int, ...] = ()

    def __init__(self, *arrays: Any, histograms: tuple[Degrees, Degrees], **options: Any) -> None:
        super().__init__(*arrays, **options)
        self.histograms = histograms

    def with_identity(self) -> Adjacency:
        """``A + I``, as if no row had a self loop."""
        return self.derived("plus identity", lambda: without_weights(self).with_self_loops())

    def own_worklist(self) -> WorkList:
        """A work list of the sizes that the degrees give."""
        small, single, hubs, partials = self.histograms[0].pieces(*thresholds(self.num_edges, self.num_rows))
        offsets, heavy = self.indptr.dtype, partials + single
        self._sort_rows(small)

        def array(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(size, dtype=dtype, device=META)

        return WorkList(
            heavy_start=array(heavy, offsets),
            heavy_len=array(heavy),
            heavy_row=array(heavy),
            light_start=array(small, offsets),
            light_len=array(small),
            light_row=array(small),
            hub_row=array(hubs),
            hub_ptr=array(hubs + 1),
            hub_of_partial=array(partials),
        )

    def make_relation_slots(self) -> RelationSlots:
        """Slots of the summary's number of (relation, node) pairs; each sparse matrix over them has its own degrees."""
        pairs, relations = max(self.relation_rows, 1), self.num_relations
        pair_keys(self)  # counting the pairs comes first
        arrays = slot_arrays(self, pairs)
        slots, chunks = arrays.means[0].numel() - 1, arrays.chunk_relation.numel()
        of_slots = Degrees(((self.num_edges / pairs, pairs), (0, slots - pairs)))
        one_each, of_pairs = Degrees(((1, pairs), (0, slots - pairs))), Degrees.even(self.num_rows, pairs)
        collect = MetaAdjacency(*arrays.collect, slots, histograms=(of_pairs, one_each))
        spread = MetaAdjacency(*arrays.spread, self.num_rows, histograms=(one_each, of_pairs))
        collect.derived("transposed", lambda: spread)
        means = MetaAdjacency(*arrays.means, self.num_cols, histograms=(of_slots, self.histograms[1]))
        offsets = torch.empty(chunks + 1, dtype=torch.int32, device=META)
        of_chunks = Degrees.even(chunks, chunks), Degrees.even(relations, chunks)
        relation_of_chunk = MetaAdjacency(offsets, arrays.chunk_relation, relations, histograms=of_chunks)
        return RelationSlots(means, collect, relation_of_chunk)

    def relation_of_edges(self) -> Adjacency:
        """One entry per edge."""
        plain, edges = relation_of_edges.__wrapped__(self), self.num_edges  # type: ignore[attr-defined]
        by_relation = Degrees.even(self.num_relations, edges)
        if self.relation_edges:
            by_relation = Degrees.counted(torch.tensor(self.relation_edges))
        degrees = Degrees.even(edges, edges), by_relation
        return MetaAdjacency(plain.indptr, plain.indices, plain.num_cols, row_scale=plain.row_scale, histograms=degrees)

    def _sort_rows(self, count: int) -> None:
        """The temporaries of building a work list, released on return: ``count`` light rows, sorted by degree."""
        degrees = self.indptr.diff().to(torch.int32)
        light = (degrees <= 1).new_empty(count, dtype=torch.int64).to(torch.int32)
        light = light[torch.sort(degrees[light], descending=True, stable=True).indices]

    def scaled(self, **factors: Any) -> Adjacency:
        """The same structure with other factors."""
        other = super().scaled(**factors)
        other.__class__, other.histograms = MetaAdjacency, self.histograms
        return other

    def _transpose(self) -> Adjacency:
        back = super()._transpose()
        if not self.symmetric:
            # The adjacency that has the work list of the transpose.
            back._structure = Adjacency.derived(
                self.structure,
                "transposed stand-in",
                lambda: MetaAdjacency(back.indptr, back.indices, back.num_cols, histograms=self.histograms[::-1]),
            )
        return back

    def _transposed_arrays(self) -> tuple[Tensor, Tensor]:
        indptr = torch.empty(self.num_cols + 1, dtype=offset_dtype(self.num_edges), device=META)
        return indptr, self.rows()[self._sort_by_source()]

    def _add_self_loops(self) -> Adjacency:
        """As for a graph without self loops; one that has some needs a few bytes less."""
        rows = self.rows()
        _ = rows == self.indices  # the check for loops comes first
        indptr, indices, weight = insert_loops(self.indptr, rows, self.indices, self.weight)
        indptr, degrees = indptr.to(offset_dtype(indices.numel())), tuple(side.with_loops() for side in self.histograms)
        return MetaAdjacency(
            indptr, indices, self.num_cols, weight=weight, symmetric=self.symmetric, histograms=degrees
        )


def counted_degrees(adj: Adjacency) -> tuple[Degrees, Degrees]:
    """Degrees of the rows and columns of a matrix with data, counted once; columns of a large one are not scanned."""

    def count() -> tuple[Degrees, Degrees]:
        by_row = Degrees.counted(adj.indptr.diff())
        if adj.symmetric or adj.num_edges > FEW_EDGES:
            return by_row, by_row
        return by_row, Degrees.counted(torch.bincount(adj.indices, minlength=adj.num_cols))

    return adj.structure.derived("degrees, counted", count)


def elsewhere(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of that shape that takes no memory of the device: the real one lies in host memory, or on disk."""
    return torch.empty((1,) * len(shape), dtype=dtype, device=META).expand(shape)


def meta_graph(graph: Graph | GraphStats, placement: DataPlacement | None = None) -> Graph:
    """A graph of the same sizes without data, on the ``meta`` device; what ``placement`` has elsewhere is empty."""
    stats = graph if isinstance(graph, GraphStats) else graph.stats()
    if not stats.num_features or not stats.num_classes:
        raise GraphError(
            f"graph {stats.name!r} has {stats.num_features} features and {stats.num_classes} classes; "
            "training needs features x and labels y"
        )
    if isinstance(graph, GraphStats):  # a summary has only in-degrees
        degrees = (Degrees.from_histogram(graph),) * 2
    else:
        degrees = counted_degrees(graph.adj)
    away = placement is not None and placement.topology != "gpu"
    dense = placement is not None and placement.features != "gpu"
    weight = torch.empty(stats.num_edges, device=META) if stats.weighted else None
    indptr = torch.empty(stats.num_nodes + 1, dtype=offset_dtype(stats.num_edges), device=META)
    edges = (stats.num_edges,)
    indices = elsewhere(edges, torch.int32) if away else torch.empty(edges, dtype=torch.int32, device=META)
    adj = MetaAdjacency(indptr, indices, weight=weight, symmetric=stats.symmetric, histograms=degrees)
    relation = torch.empty(stats.num_edges, dtype=torch.int32, device=META) if stats.num_relations else None
    adj.relation_rows, adj.relation_edges = stats.relation_rows, stats.relation_edges
    if stats.edge_features is not None:
        shape = (stats.num_edges, stats.edge_features) if stats.edge_features else (stats.num_edges,)
        adj.edge_attr = torch.empty(shape, device=META)
    whole = Graph(
        adj,
        elsewhere((stats.num_nodes, stats.num_features), torch.float32) if dense else _features(stats, graph),
        _labels(stats),
        *(
            torch.empty(size, dtype=torch.int64, device=META)
            for size in (stats.num_train, stats.num_val, stats.num_test)
        ),
        relation=relation,
        name=stats.name,
        num_classes=stats.num_classes,
        num_relations=stats.num_relations,
        numbers=stats.regression,
    )
    whole._stats = stats
    return whole


def _features(stats: GraphStats, graph: Graph | GraphStats) -> Tensor | SparseFeatures:
    dtype = getattr(torch, stats.feature_dtype)
    if stats.feature_nnz is None:
        return torch.empty(stats.num_nodes, stats.num_features, dtype=dtype, device=META)
    stored = stats.feature_nnz
    degrees = Degrees.even(stats.num_nodes, stored), Degrees.even(stats.num_features, stored)
    if isinstance(graph, Graph):
        degrees = counted_degrees(graph.x.matrix)
    indptr = torch.empty(stats.num_nodes + 1, dtype=offset_dtype(stored), device=META)
    indices = torch.empty(stored, dtype=torch.int32, device=META)
    weight = torch.empty(stored, dtype=dtype, device=META)
    return SparseFeatures(MetaAdjacency(indptr, indices, stats.num_features, weight=weight, histograms=degrees))


def _labels(stats: GraphStats) -> Tensor:
    if stats.multilabel or (stats.regression and stats.num_classes > 1):
        return torch.empty(stats.num_nodes, stats.num_classes, device=META)
    return torch.empty(stats.num_nodes, dtype=torch.float32 if stats.regression else torch.int64, device=META)
