"""Thirty-seven layers and models of PyG as users put them into modules of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch_geometric import nn as pyg

WIDTH = 8


class Around(nn.Module):
    """A layer of PyG, an activation, and a dense layer."""

    def __init__(self, layer: nn.Module, out: int, **given: Any) -> None:
        super().__init__()
        self.layer, self.last, self.given = layer, nn.Linear(WIDTH, out), given

    def forward(self, x, edge_index):
        return self.last(torch.tanh(self.layer(x, edge_index, **self.given)))


class OnHidden(nn.Module):
    """A dense layer first, for layers that keep the width, then one of PyG that may take the first features again."""

    def __init__(self, i: int, o: int, layer: nn.Module, again: bool = False) -> None:
        super().__init__()
        self.first, self.layer, self.last, self.again = nn.Linear(i, WIDTH), layer, nn.Linear(WIDTH, o), again

    def forward(self, x, edge_index):
        h = torch.tanh(self.first(x))
        return self.last(self.layer(h, h, edge_index) if self.again else self.layer(h, edge_index))


class Typed(nn.Module):
    """Relations that the module works out itself, from the numbers of the nodes."""

    def __init__(self, layer: nn.Module, out: int) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(WIDTH, out)

    def forward(self, x, edge_index):
        return self.last(torch.tanh(self.layer(x, edge_index, (edge_index[0] + edge_index[1]) % 2)))


def around(make: Callable[[int], nn.Module]) -> Callable[[int, int], nn.Module]:
    return lambda i, o: Around(make(i), o)


def hidden(make: Callable[[], nn.Module], again: bool = False) -> Callable[[int, int], nn.Module]:
    return lambda i, o: OnHidden(i, o, make(), again)


def mlp(i: int, o: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(i, WIDTH), nn.ReLU(), nn.Linear(WIDTH, o))


PNA = {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.tensor([2, 4, 8, 12, 9])}

LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "GCNConv": around(lambda i: pyg.GCNConv(i, WIDTH)),
    "GCNConv cached": around(lambda i: pyg.GCNConv(i, WIDTH, cached=True)),
    "ChebConv": around(lambda i: pyg.ChebConv(i, WIDTH, K=2)),
    "SAGEConv": around(lambda i: pyg.SAGEConv(i, WIDTH, aggr="max")),
    "GraphConv": around(lambda i: pyg.GraphConv(i, WIDTH)),
    "GatedGraphConv": around(lambda i: pyg.GatedGraphConv(WIDTH, 2)),
    "ResGatedGraphConv": around(lambda i: pyg.ResGatedGraphConv(i, WIDTH)),
    "GATConv": around(lambda i: pyg.GATConv(i, WIDTH // 2, heads=2)),
    "GATv2Conv": around(lambda i: pyg.GATv2Conv(i, WIDTH, heads=2, concat=False)),
    "TransformerConv": around(lambda i: pyg.TransformerConv(i, WIDTH // 2, heads=2)),
    "TAGConv": around(lambda i: pyg.TAGConv(i, WIDTH)),
    "GINConv": around(lambda i: pyg.GINConv(mlp(i), train_eps=True)),
    "ARMAConv": around(lambda i: pyg.ARMAConv(i, WIDTH, num_stacks=2)),
    "SGConv": around(lambda i: pyg.SGConv(i, WIDTH, K=2)),
    "SSGConv": around(lambda i: pyg.SSGConv(i, WIDTH, alpha=0.1, K=2)),
    "APPNP": hidden(lambda: pyg.APPNP(K=3, alpha=0.1)),
    "MFConv": around(lambda i: pyg.MFConv(i, WIDTH, max_degree=4)),
    "RGCNConv": lambda i, o: Typed(pyg.RGCNConv(i, WIDTH, num_relations=2), o),
    "LEConv": around(lambda i: pyg.LEConv(i, WIDTH)),
    "EdgeConv": around(lambda i: pyg.EdgeConv(mlp(2 * i))),
    "FeaStConv": around(lambda i: pyg.FeaStConv(i, WIDTH, heads=2)),
    "HypergraphConv": around(lambda i: pyg.HypergraphConv(i, WIDTH)),
    "PNAConv": around(lambda i: pyg.PNAConv(i, WIDTH, **PNA)),
    "ClusterGCNConv": around(lambda i: pyg.ClusterGCNConv(i, WIDTH)),
    "GENConv": around(lambda i: pyg.GENConv(i, WIDTH, learn_t=True, norm="layer")),
    "GCN2Conv": hidden(lambda: pyg.GCN2Conv(WIDTH, alpha=0.2), again=True),
    "FiLMConv": around(lambda i: pyg.FiLMConv(i, WIDTH)),
    "SuperGATConv": around(lambda i: pyg.SuperGATConv(i, WIDTH)),
    "EGConv": around(lambda i: pyg.EGConv(i, WIDTH, num_heads=2, num_bases=2)),
    "GeneralConv": around(lambda i: pyg.GeneralConv(i, WIDTH)),
    "MixHopConv": around(lambda i: pyg.MixHopConv(i, WIDTH // 2, powers=[0, 1])),
    "AntiSymmetricConv": hidden(lambda: pyg.AntiSymmetricConv(WIDTH)),
    "GCN with jumping knowledge": lambda i, o: pyg.models.GCN(i, WIDTH, 2, out_channels=o, jk="cat"),
    "GIN with batch norms": lambda i, o: pyg.models.GIN(i, WIDTH, 2, out_channels=o, norm="batch_norm"),
    "GATv2 with maxima": lambda i, o: pyg.models.GAT(i, WIDTH, 2, out_channels=o, heads=2, v2=True, jk="max"),
    "EdgeCNN": lambda i, o: pyg.models.EdgeCNN(i, WIDTH, 2, out_channels=o),
    "DeepGCNLayer": hidden(
        lambda: Deep(pyg.GENConv(WIDTH, WIDTH, norm="layer"), nn.LayerNorm(WIDTH), nn.ReLU()),
    ),
}


class Deep(pyg.DeepGCNLayer):
    """Without dropout, which draws other masks than a plain loop."""

    def __init__(self, conv: nn.Module, norm: nn.Module, act: nn.Module) -> None:
        super().__init__(conv, norm, act, block="res+", dropout=0.0)
