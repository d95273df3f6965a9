"""Summarise a named shape from its table alone, without generating it."""

from __future__ import annotations

import numpy as np

from weft.core.graph_stats import GraphStats
from weft.graph.catalog.shapes import Shape
from weft.graph.generate.citation import degree_limit, split_sizes
from weft.graph.generate.wiring import degree_histogram, relation_shares, relation_sizes
from weft.graph.split_rules import PER_CLASS, PLANETOID, PLANETOID_TEST, PLANETOID_VAL


def shape_stats(shape: Shape) -> GraphStats:
    """What ``shapes.make`` would summarise to, up to the scatter of degrees and words (about a per cent)."""
    edges = shape.num_edges if shape.directed else shape.num_edges // 2 * 2
    top = degree_limit(shape.num_nodes, edges, shape.max_degree)
    counts = degree_histogram(shape.num_nodes, edges, exponent=shape.exponent, max_degree=top)
    train, val, test = _split_sizes(shape)
    return GraphStats(
        name=shape.name,
        num_nodes=shape.num_nodes,
        num_edges=edges,
        num_features=shape.num_features,
        feature_nnz=_words(shape),
        feature_dtype=shape.dtype,
        num_classes=shape.num_classes,
        multilabel=shape.multilabel,
        symmetric=not shape.directed,
        num_relations=shape.relations,
        relation_edges=relation_sizes(shape.relations, edges),
        relation_rows=_relation_rows(shape, counts),
        max_degree=top,
        degree_histogram=_by_bit_length(counts),
        num_train=train,
        num_val=val,
        num_test=test,
    )


def _relation_rows(shape: Shape, counts: np.ndarray) -> int:
    """Pairs of a node and a relation that it has an in-edge of, from the nodes per degree; about a per cent off."""
    if not shape.relations:
        return 0
    degrees = np.flatnonzero(counts)
    missed = (1.0 - relation_shares(shape.relations))[:, None] ** degrees
    return int(((1.0 - missed).sum(0) * counts[degrees]).sum())


def _words(shape: Shape) -> int | None:
    if shape.density is None:
        return None
    return shape.num_nodes * max(1, round(shape.density * shape.num_features))


def _by_bit_length(counts: np.ndarray) -> tuple[int, ...]:
    """Nodes per degree ``[max + 1]`` as nodes per bit length of the degree."""
    edges = [0, *(1 << length for length in range(int(counts.size - 1).bit_length()))]
    return tuple(np.add.reduceat(counts, edges).tolist())


def _split_sizes(shape: Shape) -> list[int]:
    if shape.split != PLANETOID:
        return split_sizes(shape.split, shape.num_nodes)
    train = shape.num_classes * max(1, min(PER_CLASS, shape.num_nodes // (4 * shape.num_classes)))
    rest = shape.num_nodes - train
    val = min(PLANETOID_VAL, rest // 3)
    return [train, val, min(PLANETOID_TEST, rest - val)]
