"""The planted relational graph: its classes are in the relations and nowhere else."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.core.errors import GraphError
from weft.graph.generate import planted_relations

NODES, CLASSES, HUBS = 200, 4, 5


def make(**options) -> weft.Graph:
    return planted_relations(NODES, CLASSES, hubs_per_kind=HUBS, **options)


def test_every_node_has_one_neighbour_of_every_kind_and_relations_tell_which():
    graph = make(random_edges=0)
    src, dst = graph.edge_index()
    kind = (src - NODES) // HUBS
    for node in range(NODES):
        mine = dst == node
        assert sorted(kind[mine].tolist()) == list(range(CLASSES))
        relation = graph.relation[mine].long()
        assert torch.equal((kind[mine] - relation) % CLASSES, graph.y[node].expand(CLASSES))
    assert (graph.y[NODES:] == -1).all()


def test_random_edges_and_the_split():
    graph = make(random_edges=6)
    assert graph.num_relations == CLASSES
    assert graph.num_edges == NODES * (CLASSES + 6)
    assert (graph.train.numel(), graph.val.numel(), graph.test.numel()) == (120, 40, 40)
    assert int(graph.test.max()) < NODES


def test_a_seed_gives_the_same_graph():
    one, same, other = make(seed=3), make(seed=3), make(seed=4)
    assert torch.equal(one.adj.indices, same.adj.indices)
    assert torch.equal(one.x, same.x)
    assert not torch.equal(one.adj.indices, other.adj.indices)


def test_by_name():
    graph = weft.load("planted:relations?nodes=60&seed=2")
    assert (graph.num_nodes, graph.num_classes) == (92, 4)
    with pytest.raises(GraphError, match="no option 'scale'; a planted graph takes nodes and seed"):
        weft.load("planted:relations?scale=2")
    with pytest.raises(GraphError, match="there is no graph 'planted:trees'"):
        weft.load("planted:trees")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_classes": 1}, "num_classes=1 must lie in 2..200"),
        ({"hubs_per_kind": 0}, "hubs_per_kind=0 must be at least 1"),
    ],
)
def test_what_is_refused(given, message):
    with pytest.raises(GraphError, match=message):
        planted_relations(NODES, **{"num_classes": CLASSES, **given})
