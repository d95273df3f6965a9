"""Relations of a graph: counted, checked, kept with the edges, saved and read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import weft
from tests.nn.relational import NODES, edges, relational
from weft.core.errors import GraphError
from weft.core.graph_stats import GraphStats
from weft.graph.graph import Graph


def test_counts():
    _, dst, relation = edges()
    stats = relational().stats()
    assert stats.num_relations == 5
    assert stats.relation_edges == tuple(torch.bincount(relation).tolist())
    assert stats.relation_rows == len({(int(d), int(r)) for d, r in zip(dst, relation, strict=True)})
    assert GraphStats.from_dict(stats.to_dict()) == stats
    assert relational(num_relations=7).stats().relation_edges[5:] == (0, 0)


def test_the_adjacency_has_them():
    graph = relational()
    assert graph.adj.relation is graph.relation
    assert graph.adj.num_relations == 5
    smaller = graph.with_splits(train=[0, 1])
    assert smaller.adj is graph.adj
    src, dst, relation = edges()
    mine = sorted(zip(*graph.edge_index().tolist(), graph.relation.tolist(), strict=True))
    assert mine == sorted(zip(src.tolist(), dst.tolist(), relation.tolist(), strict=True))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"relation": [0, 4], "num_relations": 3}, "relation 4 must be below num_relations=3"),
        ({"relation": [0, 1 << 21]}, "relations are more than 1,048,576; renumber them"),
        ({"relation": [0, 1], "num_relations": 2.5}, "num_relations=2.5 must be a whole number"),
        ({"num_relations": 2}, "num_relations=2 without relation; give the relation of every edge"),
        ({"relation": [0]}, "relation has 1 rows but the graph has 2 edges"),
        ({"relation": [0, -1]}, "relation"),
    ],
)
def test_what_is_refused(given, message):
    with pytest.raises(GraphError, match=message):
        Graph.from_edges([0, 1], [1, 0], **given)


def test_saved_and_read_again(tmp_path):
    graph = relational(num_relations=7)
    graph.save(tmp_path / "saved")
    again = weft.load(tmp_path / "saved", verify=True)
    assert again.num_relations == 7
    assert torch.equal(again.relation, graph.relation)
    assert again.stats() == graph.stats()
    src, dst, relation = edges()
    np.savez(tmp_path / "few.npz", src=src, dst=dst, relation=relation, num_relations=9, num_nodes=NODES)
    assert weft.load(tmp_path / "few.npz").num_relations == 9


def test_a_damaged_relation_is_found(tmp_path):
    graph = relational()
    wrong = graph.relation.clone()
    wrong[3] = 9
    broken = Graph(graph.adj, graph.x, graph.y, relation=wrong, num_relations=5)
    with pytest.raises(GraphError, match="relation"):
        broken.verify()


def test_from_pyg_and_back():
    pytest.importorskip("torch_geometric")
    graph = relational()
    again = Graph.from_pyg(graph.to_pyg(), num_relations=8)
    assert torch.equal(again.relation, graph.relation)
    assert again.num_relations == 8


def test_one_hot_features():
    graph = relational().with_one_hot_features()
    assert torch.equal(graph.x.to_dense(), torch.eye(NODES))
    assert graph.relation is not None
    assert graph.stats().sparse_features


def test_shapes_of_the_catalogue_know_theirs():
    from weft.graph.catalog import names

    planned, real = names.stats("shape:bgs?scale=0.05"), weft.load("shape:bgs?scale=0.05").stats()
    assert planned.num_relations == real.num_relations == 96
    assert planned.relation_rows == pytest.approx(real.relation_rows, rel=0.03)
    assert sum(planned.relation_edges) == pytest.approx(real.num_edges, rel=0.01)
