"""Every check on every value of a finished graph, for one that was mapped or built without them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.core.errors import GraphError
from weft.graph.data import csr_from_edges as build
from weft.graph.data import validate
from weft.graph.data.edges import edge_values
from weft.graph.data.labels import as_labels
from weft.graph.data.sparse_features import SparseFeatures, as_features, check_csr

if TYPE_CHECKING:
    from weft.graph.data.graph import Graph


def verify(graph: Graph) -> None:
    """Raise a GraphError at the first value that is wrong."""
    adj = graph.adj
    validate.check_offsets(adj.indptr, adj.num_edges)
    validate.check_range(adj.indices, adj.num_rows, "indices")
    validate.check_ascending(adj.indptr, adj.indices)
    edge_values(adj.weight, graph.relation, adj.indices)
    if adj.symmetric and not build.is_symmetric(adj):
        raise GraphError(f"graph {graph.name!r} says it is symmetric but differs from its transpose; rebuild it")
    if isinstance(graph.x, SparseFeatures):
        check_csr(graph.x.matrix.indptr, graph.x.matrix.indices, graph.num_features)
    as_features(graph.x)
    as_labels(graph.y)
    graph.with_splits(graph.train, graph.val, graph.test)
