"""RGCNConv against PyG's RGCNConv with the same weights, and what the layer promises besides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.nn.relational import FEATURES, NODES, edges, relational
from weft.core.errors import InputError, SpecError
from weft.graph import SparseFeatures
from weft.nn import RGCN, RGCNConv, from_pyg, to_pyg
from weft.ops.csr.relation_slots import chunk_rows, num_chunks, relation_slots

KINDS = {
    "plain": {},
    "one basis": {"bases": 1},
    "bases": {"bases": 3},
    "blocks": {"blocks": 2},
    "no bias": {"bases": 2, "bias": False},
}


def make(kind: str, inputs: int = FEATURES, outputs: int = 4, relations: int = 5) -> RGCNConv:
    torch.manual_seed(1)
    conv = RGCNConv(inputs, outputs, relations, **KINDS[kind])
    for parameter in conv.parameters():
        nn.init.uniform_(parameter, -1, 1)
    return conv


def gradients(out: Tensor, module: nn.Module, *leaves: Tensor) -> list[Tensor]:
    cotangent = torch.linspace(-1, 1, out.numel()).view_as(out)
    return list(torch.autograd.grad(out, [*leaves, *module.parameters()], cotangent))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("relations", [5, 7])
def test_equals_pyg_forward_and_backward(kind: str, relations: int) -> None:
    pytest.importorskip("torch_geometric")
    ours = make(kind, relations=relations)
    theirs = to_pyg(ours)
    graph = relational(num_relations=relations)
    data = graph.to_pyg()
    x, same = (graph.x.clone().requires_grad_() for _ in range(2))
    out, expected = ours(x, graph.adj), theirs(same, data.edge_index, data.edge_type)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    found, wanted = gradients(out, ours, x), gradients(expected, theirs, same)
    named = dict(zip(["x", *(name for name, _ in ours.named_parameters())], found, strict=True))
    theirs_by_name = dict(zip(["x", *(name for name, _ in theirs.named_parameters())], wanted, strict=True))
    pairs = {"x": "x", "weight": "weight", "coefficients": "comp", "weight_self": "root", "bias": "bias"}
    for name, grad in named.items():
        other = theirs_by_name[pairs[name]]
        torch.testing.assert_close(grad, other.T if name == "weight_self" else other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_survive_both_ways(kind: str) -> None:
    pytest.importorskip("torch_geometric")
    ours = make(kind)
    back = from_pyg(to_pyg(ours))
    for (name, value), (_, other) in zip(ours.state_dict().items(), back.state_dict().items(), strict=True):
        assert torch.equal(value, other), name


def test_initial_values_have_pygs_bounds() -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    for options, theirs in (({"bases": 3}, {"num_bases": 3}), ({"blocks": 2}, {"num_blocks": 2}), ({}, {})):
        ours, other = RGCNConv(40, 60, 9, **options), pyg.RGCNConv(40, 60, 9, **theirs)
        assert abs(ours.weight.abs().max() - other.weight.abs().max()) < 0.02 * other.weight.abs().max()
        assert ours.weight.shape == other.weight.shape


@pytest.mark.parametrize("kind", KINDS)
def test_members_under_vmap_equal_each_alone(kind: str) -> None:
    graph = relational()
    convs = [make(kind) for _ in range(3)]
    for index, conv in enumerate(convs):
        with torch.no_grad():
            for parameter in conv.parameters():
                parameter.add_(0.1 * index)
    stacked = torch.func.stack_module_state(convs)[0]
    for x, dim in ((graph.x, None), (torch.stack([graph.x, 2 * graph.x, -graph.x]), 0)):
        together = torch.vmap(
            lambda weights, rows: torch.func.functional_call(convs[0], weights, (rows, graph.adj)), in_dims=(0, dim)
        )(stacked, x)
        for index, conv in enumerate(convs):
            alone = conv(x if dim is None else x[index], graph.adj)
            torch.testing.assert_close(together[index], alone, rtol=1e-5, atol=1e-5)
        found = torch.autograd.grad(together.sin().sum(), list(stacked.values()))
        for index, conv in enumerate(convs):
            alone = conv(x if dim is None else x[index], graph.adj)
            for mine, other in zip(found, torch.autograd.grad(alone.sin().sum(), list(conv.parameters())), strict=True):
                torch.testing.assert_close(mine[index], other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_features_equal_dense_ones(kind: str) -> None:
    graph, conv = relational(), make(kind)
    x = torch.where(graph.x > 0.2, graph.x, 0.0)
    dense, sparse = conv(x, graph.adj), conv(SparseFeatures.from_torch(x), graph.adj)
    torch.testing.assert_close(sparse, dense, rtol=1e-5, atol=1e-5)
    for mine, other in zip(gradients(sparse, conv), gradients(dense, conv), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_one_hot_nodes_equal_pygs_trainable_embeddings() -> None:
    pytest.importorskip("torch_geometric")
    graph, ours = relational(), make("bases", inputs=NODES)
    data, theirs = graph.to_pyg(), to_pyg(ours)
    one_hot = SparseFeatures.identity(NODES)
    expected = theirs(torch.arange(NODES), data.edge_index, data.edge_type)
    torch.testing.assert_close(ours(one_hot, graph.adj), expected, rtol=1e-5, atol=1e-5)


def test_first_aggregation_equals_plain() -> None:
    graph, conv = relational(), make("bases")
    first = conv.aggregate(graph.x, graph.adj)
    torch.testing.assert_close(conv(graph.x, graph.adj, first=first), conv(graph.x, graph.adj))


def test_slots_hold_every_edge_once_and_one_relation_per_chunk() -> None:
    src, dst, relation = edges()
    adj = relational().adj
    slots = relation_slots(adj)
    size = slots.means.num_rows // slots.matrices.num_rows
    pairs = len({(int(d), int(r)) for d, r in zip(dst, relation, strict=True)})
    assert (size, slots.matrices.num_rows) == (chunk_rows(pairs, 5), num_chunks(pairs, 5))
    assert slots.collect.num_edges == pairs
    rows, node = slots.means.rows().long(), torch.full((slots.means.num_rows,), -1)
    node[slots.collect.indices.long()] = slots.collect.rows().long()
    found = sorted(
        zip(
            slots.means.indices.tolist(),
            node[rows].tolist(),
            slots.matrices.indices[rows // size].tolist(),
            strict=True,
        )
    )
    assert found == sorted(zip(src.tolist(), dst.tolist(), relation.tolist(), strict=True))
    spread = slots.collect.transposed()
    assert torch.equal(
        spread.rows().long()[torch.sort(spread.indices, stable=True).indices], slots.collect.indices.long()
    )


def test_padded_slots_give_the_same_sums() -> None:
    from weft.batches.block import PaddedAdjacency

    graph, conv = relational(), make("bases")
    adj = graph.adj
    padded = PaddedAdjacency(adj.indptr, torch.cat([adj.indices, adj.indices.new_full((37,), 3)]), NODES)
    relation = torch.cat([adj.relation, adj.relation.new_full((37,), 2)])
    padded = padded.related(relation, adj.num_relations)
    torch.testing.assert_close(conv(graph.x, padded), conv(graph.x, adj))
    for mine, other in zip(gradients(conv(graph.x, padded), conv), gradients(conv(graph.x, adj), conv), strict=True):
        torch.testing.assert_close(mine, other)


def test_no_edges_at_all() -> None:
    graph, conv = relational(), make("bases")
    from weft import Graph

    empty = Graph.from_edges([], [], NODES, relation=[], num_relations=5)
    expected = graph.x @ conv.weight_self.T + conv.bias
    torch.testing.assert_close(conv(graph.x, empty.adj), expected)


def test_bad_layers_are_refused() -> None:
    with pytest.raises(SpecError, match="bases=2 and blocks=2 are two ways"):
        RGCNConv(4, 4, 3, bases=2, blocks=2)
    with pytest.raises(SpecError, match="blocks=3 must divide in_features=4"):
        RGCNConv(4, 6, 3, blocks=3)
    with pytest.raises(SpecError, match="hidden=8 must be a multiple of blocks=3"):
        RGCN(4, 8, 2, num_relations=2, blocks=3)
    with pytest.raises(SpecError, match="the graph has 5 relations, the layer was built for 4"):
        make("plain", relations=4)(relational().x, relational().adj)
    with pytest.raises(InputError, match="needs the relation of every edge"):
        make("plain")(relational().x, relational().adj.scaled())


def test_blocks_leave_out_layers_they_do_not_divide() -> None:
    model = RGCN(6, 8, 3, layers=3, num_relations=5, blocks=4)
    assert [conv.blocks for conv in model.convs] == [None, 4, None]
