"""Every model against PyG's: outputs, gradients, running statistics, weights both ways."""

from __future__ import annotations

import pytest
import torch

from tests.nn.examples import NODES
from tests.nn.parity import assert_same
from weft.core.errors import SpecError
from weft.nn import GAT, GCN, SAGE, from_pyg, reset_parameters, to_pyg

models = pytest.importorskip("torch_geometric.nn.models")

KINDS = {
    "gcn": (models.GCN, {}),
    "sage": (models.GraphSAGE, {}),
    "sage max": (models.GraphSAGE, {"aggr": "max"}),
    "gin": (models.GIN, {}),
    "gin learned eps": (models.GIN, {"train_eps": True}),
    "gat": (models.GAT, {"heads": 2}),
    "gat residual": (models.GAT, {"heads": 4, "residual": True, "act": "elu"}),
    "gatv2": (models.GAT, {"heads": 2, "v2": True}),
}
NORMS = {
    "plain": {},
    "batch": {"norm": "batch_norm"},
    "layer": {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}},
    "graph": {"norm": "layer_norm"},
}


def make(kind: str, norm: str = "plain", layers: int = 3, in_features: int = 6):
    build, options = KINDS[kind]
    model = build(in_features, 8, layers, out_channels=5, **options, **NORMS[norm])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(-0.5, 0.5)
    return model


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [True, False])
def test_model_equals_pyg(kind: str, norm: str, training: bool, directed) -> None:
    theirs = make(kind, norm).train(training)
    assert_same(from_pyg(theirs), theirs, torch.randn(NODES, 6), directed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [1, 2])
def test_depths(kind: str, layers: int, graph) -> None:
    theirs = make(kind, layers=layers, in_features=11)
    assert_same(from_pyg(theirs), theirs, torch.randn(NODES, 11), graph)


def test_weighted_gcn(weighted) -> None:
    theirs = make("gcn")
    assert_same(from_pyg(theirs), theirs, torch.randn(NODES, 6), weighted)


@pytest.mark.parametrize("kind", ["gcn", "gin", "gat"])
def test_running_statistics_after_several_steps(kind: str, directed) -> None:
    theirs = make(kind, "batch")
    ours = from_pyg(theirs)
    for _ in range(3):
        x = torch.randn(NODES, 6)
        ours(x, directed.adj), theirs(x, directed.edge_index)
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(x, directed.adj), theirs(x, directed.edge_index), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_survive_both_ways(kind: str, norm: str) -> None:
    theirs = make(kind, norm)
    back = to_pyg(from_pyg(theirs)).state_dict()
    assert set(back) == set(theirs.state_dict())
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(back[key], value, rtol=0, atol=0)


def test_our_own_models_go_to_pyg(directed) -> None:
    """Also those that PyG's constructors cannot make: another number of heads in the last layer."""
    x = torch.randn(NODES, 6)
    for model in (
        GAT(6, 8, 3, heads=4, out_heads=2),
        SAGE(6, 8, 3, layers=3, norm="batch"),
        GCN(6, 8, 3, input_dropout=0.5, activation="none"),
    ):
        reset_parameters(model, 3)
        model.eval()
        torch.testing.assert_close(to_pyg(model)(x, directed.edge_index), model(x, directed.adj))


def test_dropout_rates_are_carried() -> None:
    ours = from_pyg(models.GAT(6, 8, 2, out_channels=5, heads=2, dropout=0.3))
    assert [epilogue.dropout.p for epilogue in ours.epilogues] == [0.3]
    assert [conv.dropout.p for conv in ours.convs] == [0.3, 0.3]
    sites = [m.site for m in ours.modules() if hasattr(m, "site")]
    assert sites == list(range(4))


@pytest.mark.parametrize(
    "options",
    [{"jk": "cat"}, {"act": "tanh"}, {"act_first": True, "norm": "batch_norm"}, {"norm": "GraphNorm"}],
    ids=str,
)
def test_models_with_other_options_are_converted_layer_by_layer(options, graph) -> None:
    theirs = models.GCN(6, 8, 2, out_channels=5, **options)
    ours, x, index = from_pyg(theirs), torch.randn(NODES, 6), graph.edge_index
    assert [type(conv).__name__ for conv in ours.convs] == ["WeftGCNConv", "WeftGCNConv"]
    torch.testing.assert_close(ours(x, index), theirs(x, index), rtol=1e-4, atol=1e-5)


def test_a_model_without_a_layer_that_converts_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match="EdgeCNN: nothing in it can be converted: EdgeConv has no counterpart"):
        from_pyg(models.EdgeCNN(6, 8, 2, out_channels=5))
