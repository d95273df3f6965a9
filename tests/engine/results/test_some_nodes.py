"""Predictions and embeddings of some nodes: from their neighbourhoods alone, sampled on request, of hidden layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from tests.graphs_for_tests import tiny_graph
from weft.core.errors import SpecError
from weft.graph.graph import Graph

NODES = [3, 5, 8, 5, 19_990]
MODELS = {
    "gcn": {"norm": "batch"},
    "sage": {"layers": 3},
    "sage max": {"model": "sage", "aggregator": "max", "feature_norm": "row"},
    "gin": {},
    "gat": {"heads": 2, "norm": "layer"},
    "gatv2": {"heads": 2},
    "rgcn": {},
}


def trained(graph, model="gcn", **settings):
    settings = {"epochs": 2, **({"hidden": 8} if isinstance(model, str) else {}), **settings}
    return weft.run(weft.Task(graph=graph, model=model, **settings), progress=False, device="cpu")


@pytest.fixture(scope="module")
def ring() -> Graph:
    """A ring of 20,000 nodes with chords and loops: neighbourhoods are small parts of it."""
    count = 20_000
    at = torch.arange(count)
    src = torch.cat([at, (at + 1) % count, at[::7], at[::5]])
    dst = torch.cat([(at + 1) % count, at, (at[::7] * 3 + 1) % count, at[::5]])
    random = torch.Generator().manual_seed(0)
    weight = torch.rand(len(src), generator=random) + 0.5
    relation = torch.arange(len(src)) % 3
    x, y = torch.randn(count, 6, generator=random), at % 4
    graph = Graph.from_edges(src, dst, x=x, y=y, edge_weight=weight, relation=relation, num_relations=3, name="ring")
    return graph.random_split(train=0.5, val=0.2, seed=1)


class LargestFloat(TorchDispatchMode):
    """The numbers of the largest tensor of floats that was computed inside."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.largest = max(self.largest, tensor.numel())
        return made


@pytest.mark.parametrize("name", MODELS)
def test_some_nodes_have_the_numbers_of_the_whole_graph_and_compute_their_neighbourhoods_only(ring, name):
    result = trained(ring, **{"model": name, **MODELS[name]})
    every = result.predict_logits(layerwise=False)
    with LargestFloat() as some:
        found = result.predict_logits(nodes=NODES)
    assert torch.allclose(found, every[NODES], atol=1e-5)
    assert some.largest < 3 * ring.num_nodes  # a pass has 8 numbers per node; GCN's degrees read a weight per edge
    with LargestFloat() as all_nodes:
        assert torch.equal(result.predict_logits(), every)
    assert all_nodes.largest >= 6 * ring.num_nodes


def test_nearly_all_nodes_are_computed_with_the_whole_graph(ring):
    result = trained(ring, "sage", layers=3)
    every = result.predict_logits()
    assert torch.equal(result.predict_logits(nodes=range(19_000)), every[:19_000])
    assert result.predict_logits(nodes=[]).shape == (0, 4)


class MixesRows(nn.Module):
    """PairNorm between two layers: every row depends on all."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.first, self.last = weft.nn.GCNConv(in_features, 8), weft.nn.GCNConv(8, out_features)

    def forward(self, x, adj):
        h = self.first(x, adj).relu()
        h = h - h.mean(0)
        return self.last(h / h.square().sum(1).mean().sqrt(), adj)


class MixesLogits(weft.nn.GCN):
    """A subclass of a model of Weft's, whose rows depend on all others as well."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, 8, out_features)

    def forward(self, x, adj, first=None, layer=None):
        logits = super().forward(x, adj, first=first, layer=layer)
        return logits - logits.mean(0)


@pytest.mark.parametrize("model", [MixesRows, MixesLogits])
def test_a_module_that_mixes_rows_is_computed_on_the_whole_graph(ring, model):
    result = trained(ring, model)
    assert torch.equal(result.predict_logits(nodes=NODES), result.predict_logits()[NODES])


class Pyg(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        pyg = pytest.importorskip("torch_geometric.nn")
        self.first, self.last = pyg.SAGEConv(in_features, 8), pyg.SAGEConv(8, out_features)

    def forward(self, x, edge_index):
        return self.last(self.first(x, edge_index).relu(), edge_index).log_softmax(-1)


class NamesItsLayers(nn.Module):
    """``layer``, ``first`` and ``convs`` are the user's own words here, not those of Weft's models."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.convs = nn.ModuleList([weft.nn.SAGEConv(in_features, 8), weft.nn.SAGEConv(8, out_features)])

    def forward(self, x, adj, layer=None, first=True):
        h = self.convs[0](x, adj).relu()
        return h if layer == 1 else self.convs[1](h if first else x, adj)


class NamesItsLayersAsPyg(Pyg):
    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.convs = nn.ModuleList([self.first, self.last])

    def forward(self, x, edge_index, layer=None):
        h = super().forward(x, edge_index)
        return h if layer is None else h[:0]


@pytest.mark.parametrize("model", [NamesItsLayers, NamesItsLayersAsPyg])
def test_arguments_of_a_users_forward_keep_their_defaults_whatever_they_are_called(ring, model):
    result = trained(ring, model, mode="sampled", batch=8192, fanout=[3, 3], epochs=1)
    with torch.no_grad():
        plain = result.model(ring.x, ring.adj)
    assert torch.allclose(result.predict_logits(nodes=NODES), plain[NODES], atol=1e-5)
    assert torch.allclose(result.predict_logits(nodes=NODES, fanout=[-1, -1]), plain[NODES], atol=1e-5)
    assert result.embed(nodes=NODES).shape == (5, 8)


# ---- sampled ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["gcn", "sage", "rgcn", Pyg])
def test_sampled_predictions_depend_on_their_seed_and_node_alone(model):
    graph = tiny_graph()
    result = trained(graph, model)
    exact = result.predict_logits()
    assert torch.allclose(result.predict_logits(fanout=[-1, -1]), exact, atol=1e-5)
    some = result.predict_logits(nodes=[7, 3], fanout=[1, 1], seed=4)
    assert not torch.allclose(some, exact[[7, 3]], atol=1e-5)
    assert torch.equal(result.predict_logits(nodes=[7, 3, 7], fanout=[1, 1], seed=4)[:2], some)
    if isinstance(model, str):  # nodes of a module of one's own share one subgraph
        assert torch.allclose(result.predict_logits(fanout=[1, 1], seed=4)[[7, 3]], some, atol=1e-6)
    assert not torch.allclose(result.predict_logits(nodes=[7, 3], fanout=[1, 1], seed=5), some, atol=1e-6)
    assert result.predict(nodes=[7, 3], fanout=[1, 1]).shape == (2,)


@pytest.mark.parametrize(
    ("fanout", "told"), [([3], "has 1 hops for 2 layers"), ("3", "fanout='3'"), ([0, 1], "fanout=")]
)
def test_a_fan_out_that_cannot_be_used_is_one_sentence(fanout, told):
    with pytest.raises(SpecError, match=told):
        trained(tiny_graph()).predict(fanout=fanout)


@pytest.mark.parametrize(
    ("model", "options", "told"),
    [
        ("gcn", {"seed": 3}, "seed=3 would have no effect: nothing is drawn without fanout="),
        ("gcn", {"seed": "x", "fanout": [2, 2]}, "seed='x' must be a whole number"),
        ("gcn", {"seed": -1, "fanout": [2, 2]}, "seed=-1 must be at least 0"),
        ("gcn", {"layerwise": True, "fanout": [2, 2]}, "layerwise=True would have no effect with fanout="),
        ("gcn", {"layerwise": "yes"}, "layerwise='yes' must be true or false"),
        (MixesRows, {"layerwise": True}, "layerwise=True needs one of Weft's own models, not MixesRows"),
    ],
)
def test_options_that_nothing_would_read_are_refused(model, options, told):
    with pytest.raises(SpecError, match=told):
        trained(tiny_graph(), model).predict(nodes=[1], **options)


def test_layers_that_keep_their_edges_are_not_sampled():
    pyg = pytest.importorskip("torch_geometric.nn")

    class Keeps(nn.Module):
        def __init__(self, in_features, out_features):
            super().__init__()
            self.only = pyg.GCNConv(in_features, out_features, cached=True)

        def forward(self, x, edge_index):
            return self.only(x, edge_index)

    result = trained(tiny_graph(), Keeps)
    assert torch.equal(result.predict_logits(nodes=[4, 2]), result.predict_logits()[[4, 2]])
    with pytest.raises(SpecError, match="only has cached=True, and would use the edges of the first graph"):
        result.predict(fanout=[1])


# ---- embeddings ------------------------------------------------------------------------------------------------


def inputs_of(module: nn.Module, call) -> torch.Tensor:
    kept = []
    hook = module.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    with torch.no_grad():
        call()
    hook.remove()
    return kept[0]


@pytest.mark.parametrize("name", MODELS)
def test_an_embedding_is_what_the_last_layer_of_a_plain_forward_pass_is_given(ring, name):
    result = trained(ring, **{"model": name, **MODELS[name]})
    model = result.model
    plain = inputs_of(model.convs[-1], lambda: model(ring.x, ring.adj))
    assert torch.allclose(result.embed(), plain, atol=1e-6)
    assert torch.allclose(result.embed(nodes=NODES), plain[NODES], atol=1e-5)
    assert torch.allclose(result.embed(nodes=NODES, layerwise=True), plain[NODES], atol=1e-5)
    first = inputs_of(model.convs[1], lambda: model(ring.x, ring.adj))
    assert torch.allclose(result.embed(nodes=NODES, layer=1), first[NODES], atol=1e-5)
    assert result.embed(nodes=NODES, fanout=[2] * len(model.convs)).shape == (5, 8)


class Wrapped(nn.Module):
    """A model inside a model, with a head of two layers."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.body = weft.nn.SAGEConv(in_features, 8)
        self.head = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, out_features))

    def forward(self, x, adj):
        return self.head(self.body(x, adj).relu())


class Adds(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.one, self.two = nn.Linear(in_features, out_features), nn.Linear(in_features, out_features)

    def forward(self, x):
        return self.one(x.relu()) + self.two(x)


def test_embeddings_of_users_modules_or_a_sentence():
    graph = tiny_graph()
    pyg = trained(graph, Pyg, convert=False)
    plain = inputs_of(pyg.model.last, lambda: pyg.model(graph.x, graph.edge_index()))
    assert torch.equal(pyg.embed(nodes=[4, 2]), plain[[4, 2]])
    wrapped = trained(graph, Wrapped)
    plain = inputs_of(wrapped.model.head[2], lambda: wrapped.model(graph.x, graph.adj))
    assert torch.equal(wrapped.embed(), plain)
    body = inputs_of(wrapped.model.head, lambda: wrapped.model(graph.x, graph.adj))
    assert torch.equal(wrapped.embed(layer="body").relu(), body)
    adds = trained(graph, Adds)
    with pytest.raises(SpecError, match="its last hidden layer is; give layer=, the name of a part: one, two"):
        adds.embed()
    assert adds.embed(layer="two").shape == (60, 3)
    assert trained("demo").embed(layer="convs.0").shape == (2400, 8)  # of sparse features
    with pytest.raises(SpecError, match="no rows from a part 'three'; give layer=, the name of a part: one, two"):
        adds.embed(layer="three")
    with pytest.raises(SpecError, match="have no numbers; give the name of one"):
        adds.embed(layer=1)


@pytest.mark.parametrize("layer", [0, 2, True, 1.5])
def test_a_layer_that_is_no_hidden_layer_is_refused(layer):
    with pytest.raises(SpecError, match="must be the number of a hidden layer, from 1 to 1"):
        trained(tiny_graph()).embed(layer=layer)


def test_a_model_of_one_layer_has_no_hidden_one():
    with pytest.raises(SpecError, match="layers=1 has no hidden layer"):
        trained(tiny_graph(), layers=1).embed()
