"""NeighbourSampler with a fan-out per relation: blocks, subgraphs, both directions."""

from __future__ import annotations

import pytest
import torch

from tests.flow.graphs import random_graph
from weft.batches import NeighbourSampler
from weft.core.errors import InputError

SEEDS = torch.tensor([5, 79, 3, 3, 60])
FANOUTS = [{"each": 2, "3": -1}, [1, 0, 2, 0], 3]


@pytest.mark.parametrize("direction", ["in", "out"])
def test_blocks(direction):
    graph = random_graph(relations=4, weighted=True)
    batch = NeighbourSampler(graph, FANOUTS, direction=direction).sample(SEEDS, epoch=1, batch=2)
    src, dst = graph.edge_index()
    near = dst if direction == "in" else src
    nodes = batch.input_nodes.long()
    assert nodes[: SEEDS.numel()].tolist() == SEEDS.tolist()
    for block, fanout in zip(reversed(batch.blocks), [(2, 2, 2, -1), (1, 0, 2, 0)], strict=False):
        rows = torch.repeat_interleave(torch.arange(block.num_dst), block.indptr.diff().long())
        assert torch.equal(near[block.edges], nodes[rows])
        assert torch.equal(block.relation, graph.relation[block.edges])
        assert torch.equal(block.weight, graph.adj.weight[block.edges])
        assert block.adjacency().num_relations == 4
        for row in range(block.num_dst):
            there = graph.relation[near == nodes[row]]
            picked = block.relation[block.indptr[row] : block.indptr[row + 1]]
            for relation, most in enumerate(fanout):
                degree = int((there == relation).sum())
                assert int((picked == relation).sum()) == (degree if most < 0 else min(most, degree))


def test_subgraph():
    graph = random_graph(relations=4)
    local = NeighbourSampler(graph, FANOUTS, subgraph=True).sample(SEEDS)
    src, dst = graph.edge_index()
    assert torch.equal(src[local.edges], local.nodes[local.edge_index[0]].long())
    assert torch.equal(dst[local.edges], local.nodes[local.edge_index[1]].long())
    assert torch.equal(local.relation, graph.relation[local.edges])


def test_a_batch_depends_on_its_number_alone():
    graph = random_graph(relations=4)
    sampler = NeighbourSampler(graph, FANOUTS)
    first = sampler.sample(SEEDS, 3, 4)
    sampler.sample(SEEDS.flip(0), 0, 0)
    for mine in (sampler.sample(SEEDS, 3, 4), NeighbourSampler(graph, FANOUTS).sample(SEEDS, 3, 4)):
        assert all(torch.equal(a, b) for a, b in zip(first.tensors(), mine.tensors(), strict=True))
    assert not torch.equal(first.input_nodes, sampler.sample(SEEDS, 3, 5).input_nodes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"replace": True}, "fan-outs per relation are sampled uniformly without replacement"),
        ({"backend": "paper"}, "fan-outs per relation are sampled uniformly without replacement"),
        ({"degrees": "full"}, "degrees='full' weights the edges of one fan-out per hop"),
        ({"fanouts": [[1, 2]]}, "a hop of fanout has 2 numbers, but the graph has 4 relations"),
        ({"fanouts": [{"9": 2}]}, "fanout names relation 9, but the graph has relations 0 to 3"),
    ],
)
def test_what_cannot_be_sampled(given, message):
    with pytest.raises(InputError, match=message):
        NeighbourSampler(random_graph(relations=4), **{"fanouts": FANOUTS, **given})


def test_graphs_without_relations():
    with pytest.raises(InputError, match="need a graph whose edges have relations"):
        NeighbourSampler(random_graph(), [{"each": 2}])
