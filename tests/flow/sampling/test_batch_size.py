"""The capacity of a sampled batch: never exceeded, and no larger than it has to be."""

from __future__ import annotations

import torch

from tests.flow.graphs import random_graph
from weft.batches.sampler import NeighbourSampler, capacity
from weft.graph.generate import citation


def test_by_hand():
    size = capacity((3, 2), 10, 1000)
    assert size.rows == (10, 40)
    assert size.edges == (30, 80)
    assert size.nodes == 120


def test_the_graph_bounds_it():
    assert capacity((15, 10, 5), 1024, 2000).nodes == 2000
    assert capacity((-1,), 5, 100).nodes == 100
    assert capacity((3,), 10, 4).nodes == 10  # seeds may be given twice


def test_no_batch_exceeds_it():
    graph = citation(num_nodes=500, num_edges=6000, num_features=2, num_classes=2, seed=0)
    size = capacity((4, 3), 30, 500)
    for batch in range(10):
        found = NeighbourSampler(graph, [4, 3]).sample(torch.arange(30, dtype=torch.int32), 0, batch)
        assert found.input_nodes.numel() <= size.nodes
        for block, rows, edges in zip(reversed(found.blocks), size.rows, size.edges, strict=True):
            assert block.num_dst <= rows
            assert block.num_edges <= edges


def test_a_local_subgraph_has_fewer_edges():
    size = capacity([3, 2], 10, 1000)
    assert size.edges == (30, 80)
    assert size.new_edges == 30 + 30 * 2
    graph = random_graph()
    local = NeighbourSampler(graph, [4, 3], subgraph=True).sample(torch.arange(20))
    assert local.edge_index.shape[1] <= capacity([4, 3], 20, graph.num_nodes).new_edges
