"""Orders are permutations that keep the graph, and those that keep neighbours together lower what crosses ranks."""

from __future__ import annotations

import sys

import pytest
import torch

import weft
from tests.graphs_for_tests import tiny_graph
from weft.core.errors import InputError, SpecError
from weft.dist.node_order import new_ids, order_nodes, reordered, reordered_graph
from weft.dist.partition import count_remote
from weft.engine.plan import order_effect
from weft.ops.csr.adjacency import Adjacency
from weft.planner import partition as plain


@pytest.mark.parametrize("kind", ["given", "degree", "bfs", "rcm", "metis"])
def test_orders_are_permutations_that_keep_the_graph(kind):
    if kind in ("bfs", "rcm"):
        pytest.importorskip("scipy")
    if kind == "metis":
        pytest.importorskip("pymetis")
    adj = tiny_graph().adj
    order = order_nodes(adj, kind, 3)
    assert torch.equal(order.sort().values, torch.arange(adj.num_rows))
    other = reordered(adj, order)
    assert torch.equal(other.degrees(), adj.degrees()[order])
    new = {(int(order[a]), int(order[b])) for a, b in zip(other.rows().tolist(), other.indices.tolist(), strict=True)}
    assert new == set(zip(adj.rows().tolist(), adj.indices.tolist(), strict=True))


def test_an_order_that_keeps_neighbours_together_has_fewer_remote_edges():
    pytest.importorskip("scipy")
    ids = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    src, dst = ids, ids.roll(1)
    keys = torch.unique(torch.cat([src * 400 + dst, dst * 400 + src]))
    indptr = torch.zeros(401, dtype=torch.int32)
    indptr[1:] = torch.bincount(keys // 400, minlength=400).cumsum(0)
    ring = Adjacency(indptr, (keys % 400).int(), symmetric=True)
    counts = {}
    for kind in ("given", "bfs", "rcm"):
        adj = reordered(ring, order_nodes(ring, kind))
        counts[kind] = sum(count_remote(adj, plain.split_by_edges(adj.indptr.tolist(), 4).bounds))
    assert counts["rcm"] < counts["given"] / 10
    assert counts["bfs"] < counts["given"] / 10


def test_an_unknown_order_is_refused():
    with pytest.raises(SpecError, match="given, degree, bfs, rcm, metis"):
        weft.RunOptions(ranks=2, order="random")


def communities(parts: int = 3, size: int = 40) -> Adjacency:
    """Dense communities joined by a few edges, their nodes numbered at random."""
    torch.manual_seed(4)
    nodes = parts * size
    label = torch.randperm(nodes) % parts
    src, dst = torch.randint(0, nodes, (2, nodes * 30))
    kept = (src != dst) & ((label[src] == label[dst]) | (torch.rand(src.numel()) < 0.02))
    src, dst = src[kept], dst[kept]
    keys = torch.unique(torch.cat([src * nodes + dst, dst * nodes + src]))
    indptr = torch.zeros(nodes + 1, dtype=torch.int32)
    indptr[1:] = torch.bincount(keys // nodes, minlength=nodes).cumsum(0)
    return Adjacency(indptr, (keys % nodes).int(), symmetric=True)


def test_metis_finds_communities():
    pytest.importorskip("pymetis")
    adj = communities()
    before, after = order_effect(adj, "given", 3), order_effect(adj, "metis", 3)
    assert before.remote_edges > 0.5
    assert after.remote_edges < 0.2
    assert after.halo_nodes <= before.halo_nodes
    assert after.imbalance < 0.1


def test_the_effect_is_what_is_counted():
    adj = communities()
    found = order_effect(adj, "degree", 4)
    other = reordered(adj, order_nodes(adj, "degree"))
    bounds = plain.split_by_edges(other.indptr.tolist(), 4).bounds
    assert found.remote_edges == sum(count_remote(other, bounds)) / adj.num_edges


def test_metis_that_is_not_there_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(InputError, match="needs pymetis"):
        order_nodes(communities(), "metis")


def edges_of(graph, new):
    """Every edge by its new ends, with its weight and relation."""
    ends = (new[graph.adj.indices.long()].tolist(), new[graph.adj.rows().long()].tolist())
    return sorted(zip(*ends, graph.adj.weight.tolist(), graph.relation.tolist(), strict=True))


@pytest.mark.parametrize("sparse", [False, True])
def test_a_graph_in_another_order_is_the_same_graph(sparse):
    graph = tiny_graph(sparse=sparse, weighted=True)
    order = order_nodes(graph.adj, "degree")
    other, new = reordered_graph(graph, order), new_ids(order)
    dense = (lambda x: x.to_dense()) if sparse else (lambda x: x)
    assert torch.equal(dense(other.x)[new], dense(graph.x))
    assert torch.equal(other.y[new], graph.y)
    assert set(other.train.tolist()) == set(new[graph.train].tolist())
    assert edges_of(other, torch.arange(graph.num_nodes)) == edges_of(graph, new)
    x = torch.randn(graph.num_nodes, 3)
    torch.testing.assert_close(weft.ops.spmm(other.adj, x[order])[new], weft.ops.spmm(graph.adj, x))


def test_ranks_train_on_the_reordered_graph():
    graph = tiny_graph()
    found = weft.run(
        weft.Task(graph=graph, model="gcn", hidden=8, epochs=6, lr=0.05),
        ranks=2,
        options=weft.RunOptions(order="degree"),
    )
    other = reordered_graph(graph, order_nodes(graph.adj, "degree"))
    expected = weft.run(weft.Task(graph=other, model="gcn", hidden=8, epochs=6, lr=0.05))
    for name, values in expected.history.items():
        assert found.history[name] == pytest.approx(values, rel=2e-4, abs=2e-5), name


def test_an_order_without_ranks_is_refused():
    with pytest.raises(SpecError, match="order='rcm' is of use over several ranks"):
        weft.run(weft.Task(graph=tiny_graph(), model="gcn", hidden=8, epochs=1), options=weft.RunOptions(order="rcm"))
