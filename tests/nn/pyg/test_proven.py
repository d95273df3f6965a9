"""Every layer of PyG that a run converts by table: outputs and gradients as exact as PyG's own, against float64.

A run converts what this file proves: the classes and settings of ``PROVEN``, with the versions of PyG in
:data:`weft.runtime.modules.convert.TESTED`.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.nn.pyg.test_swap import LAYERS, NODES, edges, mlp
from weft.graph.sparse_features import SparseFeatures
from weft.nn.pyg.convert import possible_swaps, swap
from weft.nn.pyg.edges import remember
from weft.nn.pyg.layers import TEMPLATES
from weft.ops import Adjacency
from weft.runtime.modules.convert import TESTED

pyg = pytest.importorskip("torch_geometric.nn")
torch_geometric = pytest.importorskip("torch_geometric")
WIDTH = 8
PROVEN = {
    **{name: make for name, make in LAYERS.items() if name != "sage max"},
    "gcn wide": lambda i: pyg.GCNConv(i, 3 * i),
    "sage sum with root": lambda i: pyg.SAGEConv(i, WIDTH, aggr="add"),
    "gin sequential": lambda i: pyg.GINConv(nn.Sequential(nn.Linear(i, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))),
    "gin deep": lambda i: pyg.GINConv(mlp(i), eps=-0.1, train_eps=True),
    "gat one head": lambda i: pyg.GATConv(i, WIDTH, negative_slope=0.05, bias=False),
    "gatv2 mean": lambda i: pyg.GATv2Conv(i, WIDTH, heads=2, concat=False, residual=True),
    "graph sum": lambda i: pyg.GraphConv(i, WIDTH, aggr="add"),
    "sg deep": lambda i: pyg.SGConv(i, 2 * i, K=3, bias=False),
    "appnp": lambda i: nn.Sequential(),
}
FACTOR, FLOOR = 2, 1e-5  # an error may be twice PyG's own, or this much of the largest number


class Around(nn.Module):
    """A layer between two dense ones, so that gradients go through it in both directions."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 6)
        self.conv = pyg.APPNP(3, 0.2) if name == "appnp" else PROVEN[name](6)

    def forward(self, x, edge_index, *weights):
        return self.conv(torch.tanh(self.enter(x)), edge_index, *weights)


def numbers(model: nn.Module, x, edge_index, *weights) -> list[torch.Tensor]:
    """The output, and the gradient of every parameter for a loss that is no sum."""
    model.zero_grad()
    out = model(x, edge_index, *weights)
    torch.manual_seed(7)
    (out.float() * torch.randn(out.shape)).square().sum().to(out.dtype).backward()
    return [out.detach().double(), *(p.grad.double() for p in model.parameters() if p.grad is not None)]


def errors(mine: list[torch.Tensor], true: list[torch.Tensor]) -> list[float]:
    largest = max(float(one.abs().max()) for one in true[1:])
    scales = [max(float(one.abs().max()), 0.0 if place == 0 else 0.1 * largest) for place, one in enumerate(true)]
    return [float((one - other).abs().max()) / scale for one, other, scale in zip(mine, true, scales, strict=True)]


def check(model: nn.Module, x, *weights) -> None:
    index = edges()
    index = index[:, torch.argsort(index[1], stable=True)]
    counts = torch.bincount(index[1], minlength=NODES)
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    adj = Adjacency(indptr, index[0].int(), weight=weights[0] if weights else None)
    exact, ours = copy.deepcopy(model).double(), copy.deepcopy(model)
    found = possible_swaps(ours, draws=False)
    assert found.layers, found.kept
    swap(ours, found.layers, builds=False)
    remembered = remember(index.clone(), adj)
    true = numbers(exact, x.double(), index, *(weight.double() for weight in weights))
    own, mine = numbers(model, x, index, *weights), numbers(ours, x, remembered, *weights)
    for error, its in zip(errors(mine, true), errors(own, true), strict=True):
        assert error <= max(FACTOR * its, FLOOR)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PROVEN)
def test_a_converted_layer_is_as_exact_as_pygs(name, seed):
    torch.manual_seed(seed)
    check(Around(name), torch.randn(NODES, 5))


@pytest.mark.parametrize("name", ["gcn", "gcn wide", "graph", "graph mean", "sg", "appnp"])
def test_so_it_is_with_weights_of_edges(name):
    torch.manual_seed(0)
    check(Around(name), torch.randn(NODES, 5), torch.rand(edges().shape[1]) + 0.5)


@pytest.mark.parametrize("name", ["gcn", "sage", "gat", "gatv2", "graph", "sg"])
def test_so_it_is_on_sparse_features(name):
    torch.manual_seed(0)
    model, index = PROVEN[name](5), edges()
    index = index[:, torch.argsort(index[1], stable=True)]
    counts = torch.bincount(index[1], minlength=NODES)
    adj = Adjacency(torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int(), index[0].int())
    x = torch.randn(NODES, 5) * (torch.rand(NODES, 5) < 0.3)
    ours = copy.deepcopy(model)
    ours = nn.ModuleList([ours])
    swap(ours, ["0"], builds=False)
    sparse = SparseFeatures.from_torch(x.to_sparse())
    expected = model(x, index)
    torch.testing.assert_close(ours[0](sparse, remember(index, adj)), expected, rtol=1e-4, atol=1e-5)


def test_the_table_has_a_proof_for_every_kind():
    """And for the version of PyG that is installed."""
    proven = {type(Around(name).conv).__name__ for name in PROVEN}
    assert proven == set(TEMPLATES)
    assert torch_geometric.__version__.startswith(TESTED)
