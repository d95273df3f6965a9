"""The summary of a shape without the graph agrees with the summary of the graph."""

from __future__ import annotations

import pytest

from weft.core.errors import GraphError
from weft.graph.catalog import names as catalog
from weft.graph.catalog import shapes
from weft.graph.catalog.names import shape_stats

EXACT = (
    "name", "num_nodes", "num_edges", "num_features", "feature_dtype", "num_classes", "multilabel", "symmetric",
    "weighted", "num_relations", "num_train", "num_val", "num_test",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", ["cora", "proteins", "ogbn-arxiv?scale=0.02", "ogbn-proteins?scale=0.05", "bgs?scale=0.05"]
)
def test_it_is_what_the_generated_graph_has(name):
    planned, real = catalog.stats(f"shape:{name}"), catalog.load(f"shape:{name}").stats()
    for field in EXACT:
        assert getattr(planned, field) == getattr(real, field), field
    assert planned.sparse_features == real.sparse_features
    if real.sparse_features:
        assert planned.feature_nnz == pytest.approx(real.feature_nnz, rel=0.02)
    assert planned.max_degree == pytest.approx(real.max_degree, rel=0.1, abs=8)
    assert sum(planned.degree_histogram) == sum(real.degree_histogram)


@pytest.mark.parametrize("shape", shapes.SHAPES.values(), ids=shapes.SHAPES)
def test_every_shape_has_one(shape):
    stats = shape_stats(shape)
    assert sum(stats.degree_histogram) == shape.num_nodes
    assert stats.degree_histogram[stats.max_degree.bit_length()] >= 1
    assert stats.num_train > 0


def test_other_graphs_are_loaded():
    assert catalog.stats("demo") == catalog.load("demo").stats()


def test_unknown_shapes_are_named():
    with pytest.raises(GraphError, match="no shape 'kora'"):
        catalog.stats("shape:kora")
