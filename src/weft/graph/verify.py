"""Check every value of a finished graph, for one that was mapped or built without checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from weft.core.errors import GraphError
from weft.graph import build
from weft.graph import check as validate
from weft.graph.build import check_relations, edge_features, edge_values
from weft.graph.labels import SPLITS, as_labels
from weft.graph.sparse_features import SparseFeatures, as_features, check_csr

if TYPE_CHECKING:
    from weft.graph.graph import Graph


def check_ids(graph: Graph) -> None:
    """Raise a GraphError unless every id leads to a row that exists: what a kernel would otherwise read past.

    A saved folder is mapped and not read when it is opened, so a damaged one is first noticed here. This reads row
    offsets, edges, ids of splits and labels once, in blocks and without a copy: 2 ms per 10 M edges on one core if
    they are in memory, else the time to read 4 bytes per edge from the disk, which training would spend right after.
    """
    adj, name = graph.adj, f"graph {graph.name!r}"
    try:
        _check_matrix(adj.indptr, adj.indices, adj.num_cols, "")
        if isinstance(graph.x, SparseFeatures):
            matrix = graph.x.matrix
            _check_matrix(matrix.indptr, matrix.indices, graph.num_features, "x_", "feature ids")
        if graph.relation is not None:
            validate.check_range(graph.relation, graph.num_relations, "relation", "relation numbers")
        for split in SPLITS:
            validate.check_range(getattr(graph, split), graph.num_nodes, split)
        classes = graph.y is not None and graph.y.dim() == 1 and not graph.regression
        if classes and not validate.all_between(graph.y, -1, graph.num_classes - 1):
            raise GraphError(f"y has a class outside 0..{graph.num_classes - 1} (-1: no label)")
    except GraphError as error:
        raise GraphError(f"{name} cannot be trained on: {error}; save it again, or build it with from_edges") from None


def _check_matrix(indptr: Tensor, indices: Tensor, columns: int, prefix: str, what: str = "node ids") -> None:
    validate.check_offsets(indptr, indices.numel(), f"{prefix}indptr")
    validate.check_range(indices, columns, f"{prefix}indices", what)


def verify(graph: Graph) -> None:
    """Raise a GraphError at the first value that is wrong."""
    adj = graph.adj
    validate.check_offsets(adj.indptr, adj.num_edges)
    validate.check_range(adj.indices, adj.num_rows, "indices")
    validate.check_ascending(adj.indptr, adj.indices)
    edge_values(adj.weight, graph.relation, adj.indices)
    edge_features(adj.edge_attr, adj.indices)
    check_relations(graph.relation, graph.num_relations or None)
    if adj.symmetric and not build.is_symmetric(adj):
        raise GraphError(f"graph {graph.name!r} says it is symmetric but differs from its transpose; rebuild it")
    if isinstance(graph.x, SparseFeatures):
        check_csr(graph.x.matrix.indptr, graph.x.matrix.indices, graph.num_features)
    as_features(graph.x)
    column = graph.regression and graph.y is not None and graph.y.dim() == 1
    as_labels(graph.y[:, None] if column and graph.y is not None else graph.y)
    for number in range(graph.num_splits):
        graph.with_splits(*graph.split_rows(number))
