"""Every layer against PyG's: outputs, gradients, weights both ways."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.nn.examples import NODES, make_example
from tests.nn.parity import assert_same
from weft.core.errors import SpecError
from weft.nn import GCNConv, GINConv, from_pyg, to_pyg

pyg = pytest.importorskip("torch_geometric.nn")


def mlp(inputs: int, outputs: int, norm: str | None = None, act: str = "relu") -> nn.Module:
    return pyg.MLP([inputs, outputs, outputs], norm=norm, act=act)


LAYERS = {
    "gcn narrow": lambda: pyg.GCNConv(9, 4),
    "gcn wide": lambda: pyg.GCNConv(3, 8),
    "gcn square": lambda: pyg.GCNConv(5, 5, bias=False),
    "sage mean narrow": lambda: pyg.SAGEConv(9, 4),
    "sage mean wide": lambda: pyg.SAGEConv(3, 8),
    "sage max": lambda: pyg.SAGEConv(6, 4, aggr="max"),
    "sage sum": lambda: pyg.SAGEConv(6, 4, aggr="sum", bias=False),
    "gin narrow": lambda: pyg.GINConv(mlp(9, 4)),
    "gin wide": lambda: pyg.GINConv(mlp(3, 8)),
    "gin eps": lambda: pyg.GINConv(mlp(6, 5, act="elu"), eps=0.3),
    "gin learned eps": lambda: pyg.GINConv(mlp(6, 5), eps=0.3, train_eps=True),
    "gin learned eps wide": lambda: pyg.GINConv(mlp(3, 8), train_eps=True),
    "gin batch norm": lambda: pyg.GINConv(mlp(6, 5, norm="batch_norm")),
    "gin sequential": lambda: pyg.GINConv(nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 4))),
    "gat": lambda: pyg.GATConv(6, 5),
    "gat heads": lambda: pyg.GATConv(6, 4, heads=3),
    "gat averaged": lambda: pyg.GATConv(6, 4, heads=3, concat=False),
    "gat residual": lambda: pyg.GATConv(6, 4, heads=2, residual=True, negative_slope=0.1, bias=False),
    "gatv2": lambda: pyg.GATv2Conv(6, 5),
    "gatv2 heads": lambda: pyg.GATv2Conv(6, 4, heads=3),
    "gatv2 averaged": lambda: pyg.GATv2Conv(6, 4, heads=3, concat=False),
    "gatv2 shared": lambda: pyg.GATv2Conv(6, 4, heads=2, share_weights=True, residual=True),
}


def width(layer: nn.Module) -> int:
    weight = next(p for p in layer.parameters() if p.dim() == 2)
    return weight.shape[1]


@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_pyg(name: str, graph) -> None:
    theirs = LAYERS[name]()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(-1, 1)  # a bias of zeros would hide a missing one
    assert_same(from_pyg(theirs), theirs, torch.randn(NODES, width(theirs)), graph)


@pytest.mark.parametrize("widths", [(9, 4), (3, 8)])
def test_weighted_gcn_keeps_the_weight_of_self_loops(widths: tuple[int, int], weighted) -> None:
    theirs = pyg.GCNConv(*widths)
    assert_same(from_pyg(theirs), theirs, torch.randn(NODES, widths[0]), weighted)


@pytest.mark.parametrize("name", ["sage mean narrow", "gin narrow", "gat heads", "gatv2 heads"])
def test_other_layers_do_not_look_at_edge_weights(name: str, weighted) -> None:
    ours = from_pyg(LAYERS[name]())
    x = torch.randn(NODES, ours.in_features)
    torch.testing.assert_close(ours(x, weighted.adj), ours(x, make_example("directed").adj))


@pytest.mark.parametrize("name", LAYERS)
def test_weights_survive_both_ways(name: str) -> None:
    theirs = LAYERS[name]()
    back = to_pyg(from_pyg(theirs))
    assert type(back) is type(theirs)
    if name != "gin sequential":
        for key, value in theirs.state_dict().items():
            torch.testing.assert_close(back.state_dict()[key], value, rtol=0, atol=0)


def test_conversion_copies(directed) -> None:
    theirs = pyg.GCNConv(6, 4)
    ours = from_pyg(theirs)
    before = ours.weight.clone()
    theirs.lin.weight.data.zero_()
    torch.testing.assert_close(ours.weight, before)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: pyg.GCNConv(6, 4, improved=True), "improved=True"),
        (lambda: pyg.GCNConv(6, 4, normalize=False), "normalize=False"),
        (lambda: pyg.SAGEConv(6, 4, aggr="min"), "aggr='min'"),
        (lambda: pyg.SAGEConv(6, 4, project=True), "project=True"),
        (lambda: pyg.GATConv(6, 4, edge_dim=2), "edge_dim=2"),
        (lambda: pyg.GATConv(6, 4, aggr="mean"), "aggr='mean'"),
        (lambda: pyg.GATv2Conv(6, 4, aggr="max"), "aggr='max'"),
        (lambda: pyg.GATConv(6, 4, aggr=["add", "max"]), "aggr=["),
        (lambda: pyg.GATConv(6, 4, add_self_loops=False), "add_self_loops=False"),
        (lambda: pyg.GINConv(nn.Linear(6, 4)), "nn=Linear"),
        (lambda: pyg.ChebConv(6, 4, K=2), "ChebConv"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(make, words: str) -> None:
    with pytest.raises(SpecError) as error:
        from_pyg(make())
    assert words in str(error.value)


def test_residual_that_pyg_lacks_is_refused() -> None:
    with pytest.raises(SpecError, match="residual=True"):
        to_pyg(GCNConv(6, 4, residual=True))
    with pytest.raises(SpecError, match="Linear"):
        to_pyg(nn.Linear(3, 3))


def test_dtype_mode_and_device_follow() -> None:
    theirs = pyg.GINConv(mlp(6, 5, norm="batch_norm")).double().eval()
    ours = from_pyg(theirs)
    assert isinstance(ours, GINConv)
    assert ours.weight_in.dtype == torch.float64
    assert not ours.training
