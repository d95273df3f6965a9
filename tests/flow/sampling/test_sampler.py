"""NeighbourSampler: every backend under one contract; blocks and subgraphs hold edges of the graph and nothing else."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from tests.flow.graphs import NODES, random_graph
from weft import Graph, ops
from weft.batches import MiniBatch, NeighbourSampler, Subgraph
from weft.core.errors import GraphError, InputError
from weft.graph.readers import read
from weft.graph.saved import save

SEEDS = torch.tensor([5, 79, 3, 3, 60])
KINDS = {
    "cpu": {"backend": "cpu"},
    "two threads": {"backend": "cpu", "threads": 2},
    "replace": {"replace": True},
    "paper": {"backend": "paper"},
    "reservoir": {"backend": "reservoir"},
}


def neighbours(graph, node: int, direction: str) -> list[int]:
    src, dst = graph.edge_index()
    return (src[dst == node] if direction == "in" else dst[src == node]).tolist()


@pytest.mark.parametrize("direction", ["in", "out"])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_hold_sampled_edges(kind, direction):
    graph = random_graph()
    batch = NeighbourSampler(graph, [4, 3], direction=direction, **KINDS[kind]).sample(SEEDS, epoch=1, batch=2)
    assert isinstance(batch, MiniBatch)
    assert batch.seeds.tolist() == SEEDS.tolist()
    outer, inner = batch.blocks
    assert inner.num_dst == SEEDS.numel()
    assert inner.num_src == outer.num_dst
    assert outer.num_src == batch.input_nodes.numel()
    nodes = batch.input_nodes.tolist()
    assert nodes[: SEEDS.numel()] == SEEDS.tolist()
    assert len(set(nodes)) == len(nodes) - 1  # one seed is there twice
    for block, fanout in ((outer, 3), (inner, 4)):
        for row in range(block.num_dst):
            there = neighbours(graph, nodes[row], direction)
            picks = [nodes[i] for i in block.indices[block.indptr[row] : block.indptr[row + 1]].tolist()]
            assert set(picks) <= set(there)
            expected = (fanout if there else 0) if kind == "replace" else min(fanout, len(there))
            assert len(picks) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_depends_on_its_number_alone(kind):
    graph = random_graph()
    sampler = NeighbourSampler(graph, [4, 3], **KINDS[kind])
    first = sampler.sample(SEEDS, 3, 4)
    sampler.sample(SEEDS.flip(0), 0, 0)
    again, other = sampler.sample(SEEDS, 3, 4), sampler.sample(SEEDS, 3, 5)
    fresh = NeighbourSampler(graph, [4, 3], **KINDS[kind]).sample(SEEDS, 3, 4)
    for mine in (again, fresh):
        assert all(torch.equal(a, b) for a, b in zip(first.tensors(), mine.tensors(), strict=True))
    assert not torch.equal(first.input_nodes, other.input_nodes)


@pytest.mark.parametrize("direction", ["in", "out"])
@pytest.mark.parametrize("subgraph", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mapped_graph_gives_the_same_batches(tmp_path, kind, subgraph, direction):
    """Topology in files, read when it is sampled."""
    graph = random_graph(weighted=True)
    save(graph, tmp_path / "g")
    mapped = read(tmp_path / "g")
    assert any(str(tmp_path) in line for line in Path("/proc/self/maps").read_text().splitlines())
    about = {"subgraph": subgraph, "direction": direction, **KINDS[kind]}
    mine, theirs = (NeighbourSampler(one, [4, 3], **about).sample(SEEDS, 1, 2) for one in (mapped, graph))
    assert len(mine.tensors()) == len(theirs.tensors())
    assert all(torch.equal(a, b) for a, b in zip(mine.tensors(), theirs.tensors(), strict=True))


def test_threads_sample_at_the_same_time():
    """Batches take long enough for the threads to be in them together, each with a table of its own."""
    pairs = torch.randint(0, 50_000, (2, 500_000), generator=torch.Generator().manual_seed(3))
    seeds = torch.arange(2_000)
    sampler = NeighbourSampler(Graph.from_edges(*pairs, 50_000), [10, 10])
    expected = [sampler.sample(seeds, 0, number).input_nodes.tolist() for number in range(20)]
    found: dict[int, list[int]] = {}

    def work(first: int) -> None:
        for number in range(first, 20, 4):
            found[number] = sampler.sample(seeds, 0, number).input_nodes.tolist()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(20)] == expected


def test_full_neighbourhoods():
    graph = random_graph()
    batch = NeighbourSampler(graph, [-1]).sample(torch.arange(NODES))
    assert batch.input_nodes.tolist() == list(range(NODES))
    assert torch.equal(batch.blocks[0].indptr.long(), graph.adj.indptr.long())
    assert torch.equal(batch.blocks[0].indices, graph.adj.indices)


def test_weighted_sampling_leaves_out_what_weighs_nothing():
    graph = random_graph()
    weight = (torch.arange(graph.num_edges) % 2).float()
    batch = NeighbourSampler(graph, [10], weight=weight).sample(torch.arange(NODES))
    assert bool((weight[batch.blocks[0].edges] == 1).all())
    assert batch.blocks[0].num_edges > 100


@pytest.mark.parametrize("direction", ["in", "out"])
def test_edges_lead_to_weights_and_relations(direction):
    graph = random_graph(weighted=True, relations=4)
    sampler = NeighbourSampler(graph, [4, 3], direction=direction)
    batch = sampler.sample(SEEDS)
    src, dst = graph.edge_index()
    for block in batch.blocks:
        rows = torch.repeat_interleave(torch.arange(block.num_dst), block.indptr.diff().long())
        ends = batch.input_nodes[rows].long(), batch.input_nodes[block.indices.long()].long()
        to, origin = ends if direction == "in" else ends[::-1]
        assert torch.equal(src[block.edges], origin)
        assert torch.equal(dst[block.edges], to)
        assert torch.equal(block.weight, graph.adj.weight[block.edges])
        assert torch.equal(block.relation, graph.relation[block.edges])


@pytest.mark.parametrize("kind", ["cpu", "paper"])
@pytest.mark.parametrize("direction", ["in", "out"])
def test_subgraph(kind, direction):
    graph = random_graph(weighted=True)
    sampler = NeighbourSampler(graph, [4, 3], direction=direction, subgraph=True, **KINDS[kind])
    local = sampler.sample(SEEDS)
    assert isinstance(local, Subgraph)
    assert local.seeds.tolist() == SEEDS.tolist()
    source, target = local.nodes[local.edge_index].long()
    assert local.edge_index.max() < local.nodes.numel()
    pairs = set(zip(*graph.edge_index().tolist(), strict=True))
    assert set(zip(source.tolist(), target.tolist(), strict=True)) <= pairs
    # Each node is expanded once, with the fan-out of the hop that found it.
    expanded = local.edge_index[1 if direction == "in" else 0]
    counts = torch.bincount(expanded, minlength=local.nodes.numel())
    assert counts.max() <= 4
    assert counts[: SEEDS.numel()].tolist() == [min(4, len(neighbours(graph, int(n), direction))) for n in SEEDS]
    assert torch.equal(local.weight, graph.adj.weight[local.edges])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fanouts": []}, "one number per layer"),
        ({"fanouts": [0]}, "fan-out 0 must be at least 1"),
        ({"backend": "tpu"}, "backend='tpu' must be one of auto, cpu, gpu, paper, reservoir"),
        ({"backend": "gpu"}, "backend='gpu' cannot make batches on cpu; use 'auto'"),
        ({"device": "cuda"}, "cuda cannot sample a graph on cpu; move it"),
        ({"direction": "up"}, "direction='up'"),
        ({"backend": "paper", "replace": True}, "uniformly without replacement"),
        ({"backend": "reservoir", "fanouts": [-1]}, "with fan-outs from 1 to 1024; use 'auto'"),
        ({"weight": torch.ones(3)}, "weight has 3 numbers but the graph has"),
    ],
)
def test_what_cannot_be_sampled(given, message):
    with pytest.raises(InputError, match=message):
        NeighbourSampler(random_graph(), **{"fanouts": [2], **given})


def test_a_seed_out_of_range():
    with pytest.raises(GraphError, match="seed 80 at position 1 must be a node id from 0 to 79"):
        NeighbourSampler(random_graph(), [2]).sample(torch.tensor([0, 80]))


def test_padded_batches_are_the_gpu_s():
    sampler = NeighbourSampler(random_graph(), [2])
    with pytest.raises(InputError, match=r"backend='cpu' with fan-outs \[2\] has no padded batches"):
        sampler.sample_padded(SEEDS.to(torch.int32), torch.zeros(3, dtype=torch.int64))


def test_full_degrees_are_those_of_the_direction_that_is_followed():
    graph = random_graph()
    src, dst = graph.edge_index()
    turned = Graph.from_edges(dst, src, graph.num_nodes, x=graph.x, y=graph.y, directed=True)

    def mixed(graph: Graph, direction: str) -> torch.Tensor:
        batch = NeighbourSampler(graph, [-1], direction=direction, degrees="full").sample(torch.arange(10))
        return ops.spmm(batch.blocks[0].adjacency().gcn(), graph.x[batch.input_nodes.long()])

    torch.testing.assert_close(mixed(graph, "out"), mixed(turned, "in"))
