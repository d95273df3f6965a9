"""Results that are used: predictions equal the training's own evaluation, on its graph and on others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import weft
from tests.graphs_for_tests import tiny_graph
from weft.core.errors import GraphError, SpecError
from weft.graph.graph import Graph


def run(graph, **settings):
    settings = {"hidden": 8} | settings if isinstance(settings.get("model", "gcn"), str) else settings
    return weft.run(weft.Task(graph=graph, **{"epochs": 8, **settings}), progress=False, device="cpu")


def accuracy(result, graph, split):
    ids = getattr(graph, split)
    return (result.predict(graph, ids) == graph.y[ids]).float().mean().item()


def loss(result, graph, split):
    ids = getattr(graph, split)
    return nn.functional.cross_entropy(result.predict_logits(graph, ids), graph.y[ids]).item()


def on_more_nodes(graph: Graph, more: int = 7) -> Graph:
    """The graph with other nodes behind its own, joined among themselves: nothing changes for its own."""
    src, dst = graph.edge_index()
    count = graph.num_nodes
    extra = torch.arange(count, count + more)
    src, dst = torch.cat([src, extra[:-1]]), torch.cat([dst, extra[1:]])
    x = graph.x if isinstance(graph.x, torch.Tensor) else graph.x.to_dense()
    x = torch.cat([x, torch.rand(more, x.shape[1])])
    x = x if isinstance(graph.x, torch.Tensor) else weft.SparseFeatures.from_torch(x)
    weight = None if graph.edge_weight is None else torch.cat([graph.edge_weight, torch.ones(more - 1)])
    relation = torch.cat([graph.relation, torch.zeros(more - 1, dtype=torch.int32)])
    counts = {"num_relations": graph.num_relations}
    return Graph.from_edges(src, dst, x=x, edge_weight=weight, relation=relation, name="larger", **counts)


CASES = {
    "gcn": {},
    "feature_norm": {"feature_norm": "row"},
    "gat, norm": {"model": "gat", "heads": 2, "norm": "batch"},
    "sage": {"model": "sage"},
    "gin": {"model": "gin"},
    "rgcn": {"model": "rgcn"},
    "bf16": {"precision": "bf16"},
    "sampled": {"mode": "sampled", "fanout": [3, 3], "batch": 8, "epochs": 2},
}


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_predictions_are_the_evaluation_of_the_training(settings, sparse):
    graph = tiny_graph(sparse=sparse, weighted=settings.get("model", "gcn") == "gcn")
    result = run(graph, **settings)
    near = 3e-2 if settings.get("precision") == "bf16" else 1e-5
    for split in ("train", "val", "test"):
        assert loss(result, graph, split) == pytest.approx(result.metrics[f"{split}_loss"], abs=near)
        assert accuracy(result, graph, split) == pytest.approx(result.metrics[f"{split}_accuracy"], abs=1e-6)
    larger = on_more_nodes(graph)
    own, other = result.predict_logits(), result.predict_logits(larger, range(graph.num_nodes))
    assert torch.allclose(own, other, atol=near)
    by_layers = result.predict_logits(larger, range(graph.num_nodes), layerwise=True)
    assert torch.allclose(own, by_layers, atol=near)


def test_nodes_are_ids_in_any_order_masks_or_splits():
    graph = tiny_graph()
    result = run(graph)
    every = result.predict_proba()
    assert every.shape == (60, 3)
    assert torch.allclose(every.sum(1), torch.ones(60))
    assert torch.equal(result.predict(), every.argmax(1))
    ids = [5, 3, 3, 40]
    for layerwise in (False, True):
        assert torch.allclose(result.predict_proba(nodes=ids, layerwise=layerwise), every[ids], atol=1e-6)
    mask = torch.zeros(60, dtype=torch.bool)
    mask[[1, 2]] = True
    assert torch.equal(result.predict_proba(nodes=mask), every[[1, 2]])
    assert torch.equal(result.predict_proba(nodes="test"), every[graph.test])


def test_several_labels_are_zeros_and_ones():
    result = run(tiny_graph(multilabel=True))
    found, probabilities = result.predict(), result.predict_proba()
    assert found.shape == probabilities.shape == (60, 4)
    assert torch.equal(found, (probabilities > 0.5).long())


def test_a_graph_that_does_not_fit_is_one_sentence():
    result = run(tiny_graph())
    with pytest.raises(GraphError, match="has 2 features per node, and task 'gcn' was trained on 9"):
        result.predict(Graph.from_edges([0], [1], x=torch.ones(2, 2)))
    with pytest.raises(GraphError, match="has no features"):
        result.predict(Graph.from_edges([0], [1]))
    with pytest.raises(GraphError, match="out of range"):
        result.predict(nodes=[60])
    with pytest.raises(SpecError, match=r"must be a name, a path, a weft\.Graph, or a Data"):
        result.predict(torch.ones(3))


@pytest.mark.parametrize("sparse", [False, True])
def test_the_model_treats_features_as_its_training_did(sparse):
    """U18: ``result.model(graph.x, graph.adj)`` ignored ``feature_norm``."""
    graph = tiny_graph(sparse=sparse)
    graph = Graph(graph.adj, graph.x, graph.y, graph.train, graph.val, graph.test)
    result = run(graph, feature_norm="row", epochs=20)
    with torch.no_grad():
        logits = result.model(graph.x, graph.adj)
        by_name = result.model(x=graph.x, adj=graph.adj)
    expected = result.metrics["test_loss"]
    found = nn.functional.cross_entropy(logits[graph.test], graph.y[graph.test]).item()
    assert found == pytest.approx(expected, abs=1e-5)
    assert torch.equal(logits, by_name)


class PygNet(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        pyg = pytest.importorskip("torch_geometric.nn")
        self.first, self.last = pyg.GCNConv(in_features, 8), pyg.GCNConv(8, out_features)

    def forward(self, x, edge_index, edge_weight=None):
        assert isinstance(x, torch.Tensor)
        hidden = torch.relu(self.first(x, edge_index, edge_weight))
        return self.last(hidden, edge_index, edge_weight)


def test_a_pyg_module_is_called_with_tensors():
    """U18: a PyG module got SparseFeatures."""
    graph = tiny_graph(sparse=True, weighted=True)
    result = run(graph, model=PygNet, feature_norm="row")
    with torch.no_grad():
        short = result.model(graph.x, graph.adj)
        long = result.model(graph.x, graph.edge_index(), graph.edge_weight)
    assert torch.allclose(short, result.predict_logits(), atol=1e-6)
    assert torch.allclose(short, long, atol=1e-6)
    assert loss(result, graph, "test") == pytest.approx(result.metrics["test_loss"], abs=1e-5)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat", "gatv2"])
def test_a_trained_model_as_a_module_of_pyg_gives_the_same_outputs(model, sparse):
    pytest.importorskip("torch_geometric")
    graph = tiny_graph(sparse=sparse)
    result = run(graph, model=model, feature_norm="row", input_dropout=0.5, epochs=20)
    exported = weft.nn.to_pyg(result.model)
    x = graph.x.to_dense() if sparse else graph.x
    with torch.no_grad():
        expected, found = result.model(graph.x, graph.adj), exported(x, graph.edge_index())
        traced = torch.export.export(exported, (x, graph.edge_index())).module()(x, graph.edge_index())
        back = weft.nn.from_pyg(exported)(graph.x, graph.adj)
    for outputs in (found, traced, back):
        assert torch.allclose(outputs, expected, atol=1e-5)


def test_a_model_with_a_hook_of_its_own_is_not_converted_without_it():
    pytest.importorskip("torch_geometric")
    result = run(tiny_graph())
    result.model.register_forward_pre_hook(lambda model, args: (2 * args[0], *args[1:]))
    with pytest.raises(SpecError, match=r"forward hook .* cannot be converted; remove it"):
        weft.nn.to_pyg(result.model)


def test_a_module_that_raises_is_named_with_its_line():
    class Picky(nn.Module):
        def __init__(self, in_features, out_features):
            super().__init__()
            self.layer = nn.Linear(in_features, out_features)

        def forward(self, x):
            if x.shape[0] != 60:
                raise ValueError("only sixty")
            return self.layer(x)

    result = run(tiny_graph(), model=Picky)
    with pytest.raises(weft.WeftError, match=r"model Picky raised ValueError: only sixty \(line \d+ of .*test_predict"):
        result.predict(on_more_nodes(tiny_graph()))


def test_predicting_leaves_the_model_and_torch_as_they_were():
    graph = tiny_graph()
    result = run(graph, precision="bf16", norm="batch")
    result.model.train()
    before, state = {k: v.clone() for k, v in result.model.state_dict().items()}, torch.get_rng_state()
    result.predict()
    assert result.model.training
    assert all(torch.equal(before[k], v) for k, v in result.model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_classes_with_an_objective_of_ones_own():
    graph = tiny_graph()
    result = run(graph, model="gcn", objective=lambda out, y, rows: nn.functional.cross_entropy(out[rows], y[rows]))
    assert accuracy(result, graph, "val") == pytest.approx(result.metrics["val_accuracy"])
    with pytest.raises(SpecError, match="has no probabilities"):
        result.predict_proba()


def test_a_layer_that_keeps_the_edges_of_its_graph_does_not_predict_on_another_one():
    pyg = pytest.importorskip("torch_geometric.nn")

    class Net(nn.Module):
        def __init__(self, in_features, out_features, cached):
            super().__init__()
            self.lin, self.prop = nn.Linear(in_features, out_features), pyg.APPNP(2, 0.1, cached=cached)

        def forward(self, x, edge_index):
            return self.prop(self.lin(x), edge_index)

    graph = tiny_graph()
    found = {cached: run(graph, model=Net, model_args={"cached": cached}, convert=False) for cached in (True, False)}
    assert torch.equal(found[True].predict(graph), found[False].predict(graph))
    other = on_more_nodes(graph)
    with pytest.raises(SpecError, match="prop has cached=True and keeps the edges of the graph that it was trained on"):
        found[True].predict(other)
    assert len(found[False].predict(other)) == other.num_nodes
