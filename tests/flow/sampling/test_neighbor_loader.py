"""weft.NeighborLoader: batches as PyG's loader gives them, every seed once, uniform, the same for a seed."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.graphs_for_tests import random_graph, tiny_graph
from tests.ops.sampling.chi_square import normal_score
from weft.core.errors import InputError

pyg = pytest.importorskip("torch_geometric")


@pytest.fixture
def data():
    graph = random_graph()
    data = pyg.data.Data(x=torch.randn(300, 4), edge_index=graph.edge_index()[:, torch.randperm(graph.num_edges)])
    data.edge_attr = torch.randn(data.num_edges, 2)
    data.y, data.title = torch.arange(300), "kept"
    data.train_mask = torch.arange(300) % 3 == 0
    return data


def same(one, two):
    return all(torch.equal(one[key], two[key]) for key in ("x", "edge_index", "n_id", "e_id", "input_id", "edge_attr"))


def test_a_batch_is_the_data_at_its_nodes_and_edges(data):
    for batch in weft.NeighborLoader(data, [4, 3], data.train_mask, batch_size=32):
        batch.validate()
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
        for name in ("x", "y", "train_mask"):
            assert torch.equal(batch[name], data[name][batch.n_id])
        assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
        assert torch.equal(batch.n_id[: batch.batch_size], batch.input_id)
        assert batch.n_id.unique().numel() == batch.num_nodes
        assert batch.num_sampled_nodes[0] == batch.batch_size
        assert sum(batch.num_sampled_nodes) == batch.num_nodes
        assert sum(batch.num_sampled_edges) == batch.num_edges
        assert batch.title == "kept"
        assert torch.bincount(batch.edge_index[1]).max() <= 4


def test_all_seeds_come_once_an_epoch(data):
    loader = weft.NeighborLoader(data, [2], data.train_mask, batch_size=32, shuffle=True)
    assert len(loader) == 4
    orders = [torch.cat([batch.input_id for batch in loader]) for _ in range(2)]
    assert not torch.equal(*orders)
    for order in orders:
        assert torch.equal(order.sort().values, data.train_mask.nonzero()[:, 0])
    dropping = weft.NeighborLoader(data, [2], data.train_mask, batch_size=32, drop_last=True)
    assert [batch.batch_size for batch in dropping] == [32] * len(dropping) == [32, 32, 32]


@pytest.mark.parametrize("nodes", [None, [7, 3, 3], (None, [7, 3]), torch.tensor([5, 1], dtype=torch.int32)])
def test_seeds_as_ids_are_called_by_their_positions(data, nodes):
    (batch,) = weft.NeighborLoader(data, [2], nodes, batch_size=300)
    ids = nodes[1] if isinstance(nodes, tuple) else nodes  # as PyG's loader takes them, with their type
    seeds = torch.arange(300) if ids is None else torch.as_tensor(ids).long()
    assert torch.equal(batch.input_id, torch.arange(seeds.numel()))
    assert torch.equal(batch.n_id[: batch.batch_size], seeds)


def test_the_same_seed_gives_the_same_batches_whatever_the_threads(data):
    options = {"num_neighbors": [4, 3], "input_nodes": data.train_mask, "batch_size": 32, "shuffle": True}
    loaders = [weft.NeighborLoader(data, **options, **more) for more in ({}, {"num_workers": 3}, {"seed": 1})]
    for _ in range(2):
        for one, two, other in zip(*loaders, strict=True):
            assert same(one, two)
            assert not torch.equal(one.input_id, other.input_id)


def test_every_neighbour_is_as_likely():
    degree, nodes, fanout = 7, 4000, 3
    centres = torch.arange(nodes).repeat_interleave(degree)
    leaves = nodes + torch.arange(degree).repeat(nodes)
    data = pyg.data.Data(edge_index=torch.stack([leaves, centres]), num_nodes=nodes + degree)
    counts = torch.zeros(degree)
    for batch in weft.NeighborLoader(data, [fanout], torch.arange(nodes), batch_size=500):
        source = batch.n_id[batch.edge_index[0]] - nodes
        picked = torch.bincount(batch.edge_index[1] * degree + source, minlength=500 * degree)
        assert picked.max() == 1  # without replacement
        counts += torch.bincount(source, minlength=degree)
    expected = torch.full((degree,), nodes * fanout / degree)
    assert abs(normal_score(expected + (counts - expected) / (1 - fanout / degree) ** 0.5, expected)) < 4.5


def test_weights_choose_neighbours(data):
    data.odds = (data.edge_index[0] < 150).float()
    for batch in weft.NeighborLoader(data, [3], batch_size=64, weight_attr="odds"):
        assert (batch.n_id[batch.edge_index[0]] < 150).all()


def test_the_data_is_read_when_a_batch_is_made(data):
    """As a script for inference layer by layer takes it: without features, with ids of its own."""
    loader = weft.NeighborLoader(data, [-1], batch_size=64)
    del loader.data.x
    loader.data.n_id = torch.arange(300) + 1000
    batch = next(iter(loader))
    assert "x" not in batch
    assert batch.n_id.min() >= 1000
    doubled = weft.NeighborLoader(data, [1], batch_size=64, transform=lambda batch: batch.num_edges)
    assert all(isinstance(count, int) for count in doubled)


def test_pyg_models_trim_its_batches_and_weft_trains_on_them():
    graph = tiny_graph()
    data = graph.to_pyg()
    net = pyg.nn.GraphSAGE(graph.num_features, 8, 2, out_channels=graph.num_classes).eval()
    for batch in weft.NeighborLoader(data, [-1, -1], batch_size=20):
        hops = {"num_sampled_nodes_per_hop": batch.num_sampled_nodes}
        hops |= {"num_sampled_edges_per_hop": batch.num_sampled_edges}
        out = net(batch.x, batch.edge_index, **hops)[: batch.batch_size]
        torch.testing.assert_close(out, net(data.x, data.edge_index)[batch.n_id[: batch.batch_size]])
    loader = weft.NeighborLoader(data, [5, 3], data.train_mask, batch_size=8, shuffle=True)
    task = weft.Task(graph, "sage", hidden=4, num_neighbors=[5, 3], batch_size=8, epochs=3)
    result = weft.run(task, device="cpu", progress=False, options=weft.RunOptions(batches=loader))
    assert result.status == "finished"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"disjoint": True}, "disjoint=True is not supported; leave it out"),
        ({"subgraph_type": "induced"}, "subgraph_type='induced' is not supported"),
        ({"input_time": torch.arange(3)}, "input_time=tensor.* is not supported"),
        ({"batchsize": 3}, r"NeighborLoader has no argument 'batchsize' \(did you mean 'batch_size'\?\)"),
        ({"batch_size": 0}, "NeighborLoader: batch_size=0 must be at least 1"),
        ({"input_nodes": torch.zeros(7, dtype=torch.bool)}, "must be a mask of 300 nodes, or node ids, and have at"),
        ({"input_nodes": [0.5]}, r"input_nodes\[0\] = 0.5 is of type float64; ids must be integers"),
        ({"input_nodes": [3, 300]}, r"input_nodes\[1\] = 300 is out of range: nodes of the data must lie in 0..299"),
        ({"input_nodes": ("paper", [3])}, "input_nodes is not a rectangular array"),
        ({"weight_attr": "width"}, r"weight_attr='width': Data\(.*\) has no such attribute"),
        ({"device": "tpu"}, "device 'tpu' is unknown"),
        ({"num_neighbors": 5}, r"num_neighbors=5 must list a number per hop, such as \[15, 10\]"),
        ({"num_neighbors": {"a": [5]}}, "num_neighbors={'a': .* must list a number per hop"),
    ],
)
def test_what_it_does_not_do_is_refused_by_name(data, options, words):
    with pytest.raises(InputError, match=words):
        weft.NeighborLoader(data, **{"num_neighbors": [5], **options})


def test_other_data_is_refused(data):
    with pytest.raises(InputError, match="not this HeteroData; HeteroData is converted with to_homogeneous"):
        weft.NeighborLoader(pyg.data.HeteroData(), [5])
    with pytest.raises(InputError, match="takes a PyG Data with an edge_index"):
        weft.NeighborLoader(pyg.data.Data(x=data.x, edge_index=data.edge_index + 1), [5])
