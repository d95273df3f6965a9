"""Layers over rectangular blocks: with full neighbourhoods they give the rows of the whole graph."""

from __future__ import annotations

import pytest
import torch

from tests.graphs_for_tests import tiny_graph
from weft import nn, ops
from weft.core.errors import InputError
from weft.nn.features import keep_own_rows
from weft.nn.models import GNN
from weft.ops import Adjacency

MODELS = {
    "gcn": {},
    "sage": {},
    "sage-max": {"aggregator": "max"},
    "sage-sum": {"aggregator": "sum"},
    "gin": {},
    "gin-eps": {"eps": 0.3},
    "gin-learned": {"train_eps": True},
    "gat": {"heads": 2, "out_heads": 2},
    "gatv2": {"heads": 2},
    "rgcn": {"num_relations": 4},
    "rgcn-bases": {"num_relations": 4, "bases": 2},
}


def block_of(adj: Adjacency, wanted: torch.Tensor, scale: torch.Tensor) -> tuple[Adjacency, torch.Tensor]:
    """All in-edges of ``wanted`` as a block, and the nodes of its columns: ``wanted`` first, new ones behind."""
    spans = [torch.arange(int(adj.indptr[node]), int(adj.indptr[node + 1])) for node in wanted.tolist()]
    rows = [adj.indices[span].long() for span in spans]
    edges = torch.cat(rows)
    known = set(wanted.tolist())
    nodes = torch.tensor(wanted.tolist() + [n for n in dict.fromkeys(edges.tolist()) if n not in known])
    place = torch.empty(adj.num_rows, dtype=torch.int64)
    place[nodes] = torch.arange(nodes.numel())
    local = torch.cat([place[row] for row in rows]).int()
    indptr = torch.tensor([0, *[row.numel() for row in rows]]).cumsum(0).int()
    block = Adjacency(indptr, local, nodes.numel(), source_scale=scale[nodes])
    return block.related(adj.relation[torch.cat(spans)], adj.num_relations), nodes


def blocks_for(adj: Adjacency, wanted: torch.Tensor, layers: int) -> tuple[list[Adjacency], torch.Tensor]:
    scale = adj.gcn().col_scale
    blocks: list[Adjacency] = []
    for _ in range(layers):
        block, wanted = block_of(adj, wanted, scale)
        blocks.insert(0, block)
    return blocks, wanted


def made(name: str, layers: int, residual: bool, norm: str | None) -> GNN:
    graph = tiny_graph()
    model = nn.build(
        name.split("-")[0],
        graph.num_features,
        graph.num_classes,
        hidden=8,
        layers=layers,
        dropout=0.0,
        residual=residual,
        norm=norm,
        **MODELS[name],
    )
    nn.reset_parameters(model, 3)
    return model


@pytest.mark.parametrize("norm", [None, "layer"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_blocks_with_full_neighbourhoods_are_the_whole_graph(name, layers, residual, norm):
    graph, model = tiny_graph(), made(name, layers, residual, norm)
    wanted = torch.tensor([5, 0, 17, 3])
    x = graph.x.to_dense() if not isinstance(graph.x, torch.Tensor) else graph.x
    blocks, nodes = blocks_for(graph.adj, wanted, layers)
    whole, some = model(x, graph.adj)[wanted], model(x[nodes], blocks)
    torch.testing.assert_close(some, whole, rtol=1e-4, atol=1e-5)
    ours, theirs = ([*torch.autograd.grad(out.sum(), list(model.parameters()))] for out in (some, whole))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["gcn", "sage", "gin", "gat", "rgcn"])
def test_the_first_aggregation_of_a_block(name):
    graph, model = tiny_graph(), made(name, 2, False, None)
    x = graph.x.to_dense() if not isinstance(graph.x, torch.Tensor) else graph.x
    blocks, nodes = blocks_for(graph.adj, torch.tensor([1, 8]), 2)
    first = model.first_aggregate(x[nodes], blocks)
    torch.testing.assert_close(model(x[nodes], blocks, first=first), model(x[nodes], blocks), rtol=1e-4, atol=1e-5)


def test_one_block_too_few():
    model, graph = made("gcn", 3, False, None), tiny_graph()
    with pytest.raises(InputError, match="2 blocks were given for 3 layers"):
        model(graph.x, [graph.adj, graph.adj])


def test_gcn_asks_for_the_degrees_of_a_blocks_sources():
    block = Adjacency(torch.tensor([0, 1]).int(), torch.tensor([1]).int(), 2)
    with pytest.raises(InputError, match="source_scale"):
        block.gcn()


def test_an_adjacency_may_supply_its_own_aggregation():
    """So that a shard can read remote rows: layers do not know."""

    class Doubled(Adjacency):
        def spmm(self, x, weight=None, reduce="sum"):
            plain = Adjacency(self.indptr, self.indices, self.num_cols)
            return 2 * ops.spmm(plain, x, weight, reduce)

    graph = tiny_graph()
    x = torch.randn(graph.num_nodes, 4)
    mine = Doubled(graph.adj.indptr, graph.adj.indices)
    torch.testing.assert_close(ops.spmm(mine, x), 2 * ops.spmm(graph.adj, x))
    layer = nn.SAGEConv(4, 3)
    nn.reset_parameters(layer, 0)
    apart = nn.SAGEConv(4, 3)
    apart.load_state_dict(layer.state_dict())
    with torch.no_grad():
        apart.weight_neighbour.mul_(2)
    torch.testing.assert_close(layer(x, mine), apart(x, graph.adj))


@pytest.mark.parametrize("tasks", [0, 3])
def test_own_rows_and_all_rows_have_the_gradient_of_a_slice(tasks):
    """Also under vmap, where the backward pass adds in place."""
    x = torch.randn(*([tasks] if tasks else []), 7, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 7, dtype=torch.float64)

    def kept(x):
        own, rest = keep_own_rows(x, 3)
        return (own**2).sum() + ((weight @ rest) ** 3).sum()

    def sliced(x):
        return (x.narrow(-2, 0, 3) ** 2).sum() + ((weight @ x) ** 3).sum()

    mine, theirs = (torch.vmap(f) if tasks else f for f in (kept, sliced))
    for one, other in zip(torch.autograd.grad(mine(x).sum(), x), torch.autograd.grad(theirs(x).sum(), x), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["gcn", "sage", "gin"])
def test_the_first_layer_of_blocks_builds_no_transpose(name, monkeypatch):
    """Features need no gradient: only the blocks of later layers are transposed."""
    turned = []
    monkeypatch.setattr(Adjacency, "_sort_by_source", lambda adj, sort=Adjacency._sort_by_source: (
        turned.append(adj.num_cols) or sort(adj)
    ))  # fmt: skip
    graph, model = tiny_graph(), made(name, 2, False, None)
    blocks, nodes = blocks_for(graph.adj, torch.tensor([1, 8]), 2)
    model(graph.x[nodes], blocks).sum().backward()
    assert blocks[0].num_cols not in turned
    assert blocks[1].num_cols in turned
