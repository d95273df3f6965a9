"""Summarise a graph: a line for people, GraphStats for plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.core.graph_stats import GraphStats
from weft.graph.build import relation_edges, relation_rows
from weft.graph.check import dtype_name
from weft.graph.sparse_features import SparseFeatures

if TYPE_CHECKING:
    from weft.graph.graph import Graph


def stats_of(graph: Graph) -> GraphStats:
    """The summary that is enough to plan with."""
    degrees = graph.adj.degrees()
    return GraphStats(
        name=graph.name,
        num_nodes=graph.num_nodes,
        num_edges=graph.num_edges,
        num_features=graph.num_features,
        feature_nnz=graph.x.nnz if isinstance(graph.x, SparseFeatures) else None,
        feature_dtype="float32" if graph.x is None else dtype_name(graph.x.dtype),
        num_classes=graph.num_classes,
        multilabel=graph.multilabel,
        regression=graph.regression,
        symmetric=graph.adj.symmetric,
        weighted=graph.adj.weight is not None,
        num_relations=graph.num_relations,
        relation_edges=relation_edges(graph.adj),
        relation_rows=relation_rows(graph.adj),
        max_degree=int(degrees.max()),
        degree_histogram=degree_histogram(degrees),
        num_train=graph.train.numel(),
        num_val=graph.val.numel(),
        num_test=graph.test.numel(),
        num_splits=graph.num_splits,
        edge_features=_edge_features(graph),
    )


def _edge_features(graph: Graph) -> int | None:
    attr = graph.edge_attr
    return None if attr is None else 0 if attr.dim() == 1 else attr.shape[1]


def degree_histogram(degrees: Tensor) -> tuple[int, ...]:
    """How many degrees have each bit length."""
    # frexp's exponent of a float64 is the exact bit length of an integer below 2^53, and 0 for 0.
    lengths = torch.frexp(degrees.double()).exponent
    return tuple(torch.bincount(lengths).tolist())


def describe(graph: Graph) -> str:
    """One line: sizes, features, labels, splits, device."""
    parts = [f"{graph.num_nodes:,} nodes", _edges(graph)]
    if graph.x is not None:
        parts.append(_features(graph))
    if graph.y is not None:
        kind = "labels per node" if graph.multilabel else "numbers to predict" if graph.regression else "classes"
        one = graph.regression and graph.num_classes == 1
        parts.append("a number to predict" if one else f"{graph.num_classes:,} {kind}")
    if graph.train.numel() or graph.val.numel() or graph.test.numel():
        parts.append(f"train/val/test {graph.train.numel():,}/{graph.val.numel():,}/{graph.test.numel():,}")
    if graph.num_splits > 1:
        parts.append(f"the first of {graph.num_splits} splits")
    return f"Graph({graph.name!r}: {', '.join(parts)}, on {graph.device})"


def _edges(graph: Graph) -> str:
    kinds = ["symmetric" if graph.adj.symmetric else "directed"]
    if graph.adj.weight is not None:
        kinds.append("weighted")
    if graph.edge_attr is not None:
        kinds.append(f"{max(_edge_features(graph) or 0, 1)} edge features")
    if graph.relation is not None:
        kinds.append(f"{graph.num_relations} relations")
    return f"{graph.num_edges:,} edges ({', '.join(kinds)})"


def _features(graph: Graph) -> str:
    kind = dtype_name(graph.x.dtype)
    if isinstance(graph.x, SparseFeatures):
        share = graph.x.nnz / max(graph.num_nodes * graph.num_features, 1)
        kind = f"sparse {kind}, {100 * share:.2g} % filled"
    return f"{graph.num_features:,} features ({kind})"
