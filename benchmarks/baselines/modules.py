"""Models as users write them, made at random but reproducibly: mixed convolutions, norms, residuals, jumping knowledge.

``random_module(seed)`` is a factory ``(in_features, out_features) -> nn.Module`` over ``weft.nn`` layers;
``opaque_module(name)`` one over PyG, which Weft knows nothing about.
Shapes: N nodes, F features in, H hidden, C classes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weft.nn import BatchNorm, Dropout, GATConv, GATv2Conv, GCNConv, GINConv, LayerNorm, SAGEConv
from weft.ops import Adjacency

Factory = Callable[[int, int], nn.Module]

CONVS = ("gcn", "sage", "gin", "gat", "gatv2")
NORMS = ("batch", "layer", "none")
JUMPS = ("last", "cat", "max", "sum")


@dataclass(frozen=True)
class Recipe:
    """What a random module is made of."""

    convs: tuple[str, ...]
    width: int
    heads: int
    norm: str
    jump: str
    skip: bool
    dropout: float
    head_layers: int

    @classmethod
    def of(cls, seed: int) -> Recipe:
        """The recipe of a seed; every fifth has GATv2, so that all kinds occur among twenty."""
        draw = random.Random(seed)
        convs = [draw.choice(CONVS) for _ in range(draw.randint(2, 5))]
        if seed % 5 == 0:
            convs[0] = "gatv2"
        return cls(
            convs=tuple(convs),
            width=draw.choice((16, 32, 64, 128)),
            heads=draw.choice((1, 2, 4)),
            norm=NORMS[seed % len(NORMS)],
            jump=JUMPS[seed % len(JUMPS)],
            skip=draw.random() < 0.5,
            dropout=draw.choice((0.0, 0.3, 0.6)),
            head_layers=draw.choice((1, 2)),
        )


def _conv(kind: str, size_in: int, size_out: int, heads: int) -> nn.Module:
    if kind in ("gat", "gatv2"):
        return (GATConv if kind == "gat" else GATv2Conv)(size_in, size_out, heads=heads)
    return {"gcn": GCNConv, "sage": SAGEConv, "gin": GINConv}[kind](size_in, size_out)


class RandomModule(nn.Module):
    """``h_l = dropout(relu(norm(conv_l(h_l-1, A)))) (+ h_l-1)``; the layers are joined and go through a small MLP."""

    def __init__(self, recipe: Recipe, in_features: int, out_features: int) -> None:
        super().__init__()
        self.jump, self.skip = recipe.jump, recipe.skip
        sizes = [in_features, *[recipe.width] * len(recipe.convs)]
        self.convs = nn.ModuleList(
            _conv(kind, *sizes[place : place + 2], recipe.heads) for place, kind in enumerate(recipe.convs)
        )
        make = {"batch": BatchNorm, "layer": LayerNorm, "none": lambda width: nn.Identity()}[recipe.norm]
        self.norms = nn.ModuleList(make(recipe.width) for _ in recipe.convs)
        self.dropout = nn.ModuleList(Dropout(recipe.dropout) for _ in recipe.convs)
        joined = recipe.width * (len(recipe.convs) if recipe.jump == "cat" else 1)
        hidden = [layer for _ in range(recipe.head_layers - 1) for layer in (nn.Linear(joined, joined), nn.ReLU())]
        self.head = nn.Sequential(*hidden, nn.Linear(joined, out_features))

    def forward(self, x: Tensor, adj: Adjacency) -> Tensor:
        """Logits ``[N, C]``."""
        layers: list[Tensor] = []
        for conv, norm, dropout in zip(self.convs, self.norms, self.dropout, strict=True):
            h = dropout(torch.relu(norm(conv(x, adj))))
            x = h + layers[-1] if self.skip and layers else h
            layers.append(x)
        return self.head(self._joined(layers))

    def _joined(self, layers: list[Tensor]) -> Tensor:
        if self.jump == "cat":
            return torch.cat(layers, -1)
        if self.jump == "sum":
            return sum(layers[1:], layers[0])
        return torch.stack(layers).amax(0) if self.jump == "max" else layers[-1]


def random_module(seed: int) -> Factory:
    """The factory of the module of a seed."""

    def build(in_features: int, out_features: int) -> nn.Module:
        return RandomModule(Recipe.of(seed), in_features, out_features)

    build.__name__ = f"random-{seed}"
    return build


OPAQUE: dict[str, tuple[str, dict[str, object]]] = {
    "pyg-gcn": ("GCN", {}),
    "pyg-gcn-jk": ("GCN", {"jk": "cat", "norm": "batch_norm"}),
    "pyg-sage": ("GraphSAGE", {"norm": "layer_norm"}),
    "pyg-gin": ("GIN", {"norm": "batch_norm"}),
    "pyg-gat": ("GAT", {"heads": 4}),
    "pyg-gatv2": ("GAT", {"heads": 4, "v2": True, "jk": "max"}),
}


def opaque_module(name: str, layers: int = 3, hidden: int = 64) -> Factory:
    """The factory of a PyG model, called the PyG way: ``(x, edge_index)``."""
    kind, options = OPAQUE[name]

    def build(in_features: int, out_features: int) -> nn.Module:
        from torch_geometric.nn import models

        return getattr(models, kind)(in_features, hidden, layers, out_features, dropout=0.5, **options)

    build.__name__ = name
    return build
