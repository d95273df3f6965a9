"""The trainings whose memory and time are estimated: CoGNN's five queues, users' modules, PyG's modules.

A queue of CoGNN has 20 trainings of one model (or of all four: Mix), 4 to 10 layers of 64, on the 11 shapes of its
Table IV. Which of the 77 combinations a queue has is not published; here they are drawn by seed, every shape at least
once. All settings are plain data, so that a graph can be shared by everything that is trained on it.

Modules as users write them: ``random_module(seed)`` over ``weft.nn`` layers, ``opaque_module(name)`` over PyG, which
Weft knows nothing about, ``users_module(name)`` with torch's own norms, dropout and attention. Each is a factory
``(in_features, out_features) -> nn.Module``. Shapes: N nodes, F features in, H hidden, C classes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.core.models import BUILT_IN
from weft.core.task import Task
from weft.graph.graph import Graph
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


def named(name: str, make: Factory) -> Factory:
    """A factory called ``name``, which the names of tasks are made of."""

    def build(in_features: int, out_features: int) -> nn.Module:
        return make(in_features, out_features)

    build.__name__ = name
    return build


def random_module(seed: int) -> Factory:
    """The factory of the module of a seed."""
    return named(f"random-{seed}", partial(RandomModule, Recipe.of(seed)))


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

    def make(in_features: int, out_features: int) -> nn.Module:
        from torch_geometric.nn import models

        return getattr(models, kind)(in_features, hidden, layers, out_features, dropout=0.5, **options)

    return named(name, make)


class NormedGCN(nn.Module):
    """Three of Weft's convolutions with torch's norm, relu and dropout between them, and skip connections."""

    def __init__(self, norm: Callable[[int], nn.Module], conv: type, inputs: int, outputs: int, hidden: int) -> None:
        super().__init__()
        sizes = [inputs, hidden, hidden, outputs]
        self.convs = nn.ModuleList(conv(a, b) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(norm(hidden) for _ in range(2))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, adj: Adjacency) -> Tensor:
        """Logits ``[N, C]``."""
        for place, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=False)):
            out = self.dropout(torch.relu(norm(conv(x, adj))))
            x = out if place == 0 else out + x
        return self.convs[-1](x, adj)


class GatedMLP(nn.Module):
    """Attention of every node over its own feature groups (torch's), then two convolutions."""

    def __init__(self, inputs: int, outputs: int, hidden: int, groups: int = 4) -> None:
        super().__init__()
        self.groups, self.first = groups, nn.Linear(inputs, hidden)
        self.query, self.key, self.value = (nn.Linear(hidden // groups, hidden // groups) for _ in range(3))
        self.norm = nn.LayerNorm(hidden)
        self.convs = nn.ModuleList([GCNConv(hidden, hidden), GCNConv(hidden, outputs)])

    def forward(self, x: Tensor, adj: Adjacency) -> Tensor:
        """Logits ``[N, C]``."""
        h = F.dropout(torch.relu(self.first(x)), 0.5, self.training)
        parts = h.unflatten(-1, (self.groups, -1))
        scores = self.query(parts) @ self.key(parts).transpose(-1, -2) / parts.shape[-1] ** 0.5
        mixed = torch.softmax(scores, -1) @ self.value(parts)
        h = self.norm(h + mixed.flatten(-2))
        return self.convs[1](torch.relu(self.convs[0](h, adj)), adj)


class PygTransformer(nn.Module):
    """Two of PyG's TransformerConv with torch's layer norm and dropout."""

    def __init__(self, inputs: int, outputs: int, hidden: int, heads: int = 2) -> None:
        from torch_geometric.nn import TransformerConv

        super().__init__()
        self.first = TransformerConv(inputs, hidden // heads, heads=heads, dropout=0.2)
        self.second = TransformerConv(hidden, outputs, heads=1)
        self.norm, self.dropout = nn.LayerNorm(hidden), nn.Dropout(0.5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Logits ``[N, C]``."""
        return self.second(self.dropout(torch.relu(self.norm(self.first(x, edge_index)))), edge_index)


def _makers(hidden: int) -> dict[str, Factory]:
    return {
        "own-layernorm-gcn": lambda i, o: NormedGCN(nn.LayerNorm, GCNConv, i, o, hidden),
        "own-batchnorm-gcn": lambda i, o: NormedGCN(nn.BatchNorm1d, GCNConv, i, o, hidden),
        "own-layernorm-sage": lambda i, o: NormedGCN(nn.LayerNorm, SAGEConv, i, o, hidden),
        "own-attention": lambda i, o: GatedMLP(i, o, hidden),
        "own-transformerconv": lambda i, o: PygTransformer(i, o, hidden),
    }


NAMES = tuple(_makers(16))


def users_module(name: str, hidden: int = 64) -> Factory:
    """The factory of a module by its name."""
    return named(name, _makers(hidden)[name])


SHAPES = (
    "cora", "citeseer", "pubmed", "proteins", "artist", "soc-blog", "dd", "amazon0601", "twitter", "yeast", "ovcar-8h",
)  # fmt: skip
LAYERS = range(4, 11)
QUEUES = ("gcn", "sage", "gat", "gin", "mix")
QUEUE_LENGTH = 20
MODULES = 20
MODULE_SHAPES = ("pubmed", "artist", "soc-blog", "dd", "amazon0601")
OPAQUE_SHAPES = ("pubmed", "soc-blog", "amazon0601")
USERS_SHAPES = ("pubmed", "soc-blog", "ogbn-arxiv")
SETS = ("queues", "modules", "opaque", "users")


@dataclass(frozen=True)
class Entry:
    """One training: the set it belongs to, its name and shape, and what model it is."""

    kind: str  # of SETS
    queue: str
    shape: str
    model: str
    layers: int = 0
    seed: int = 0

    @property
    def name(self) -> str:
        """``"gcn-7"``, ``"random-3"``, ``"pyg-gat"``."""
        return f"{self.model}-{self.layers}" if self.kind == "queues" else self.model

    def tasks(self, graph: Graph, count: int, hidden: int) -> list[Task]:
        """``count`` such trainings that differ in their seeds and rates."""
        settings: dict[str, Any] = {"model": self._model(hidden), "epochs": 400}
        if self.kind == "queues":
            settings |= {"layers": self.layers, "hidden": hidden}
            settings |= {"heads": 4, "out_heads": 4} if BUILT_IN[self.model].has_heads else {}
        return [Task(graph=graph, name=f"{self.name}-{i}", seed=i, lr=0.01 / (1 + i), **settings) for i in range(count)]

    def _model(self, hidden: int) -> Any:
        if self.kind == "modules":
            return random_module(self.seed)
        if self.kind == "users":
            return users_module(self.model, hidden)
        return opaque_module(self.model, hidden=hidden) if self.kind == "opaque" else self.model


def queue(name: str) -> list[Entry]:
    """The 20 trainings of one of CoGNN's queues: every shape at least once, the rest drawn."""
    draw = random.Random(f"queue {name}")
    models = QUEUES[:-1] if name == "mix" else (name,)
    places = [(shape, layers) for shape in SHAPES for layers in LAYERS]
    first = [(shape, draw.choice(LAYERS)) for shape in SHAPES]
    rest = draw.sample([place for place in places if place not in first], QUEUE_LENGTH - len(first))
    return [Entry("queues", name, shape, draw.choice(models), layers) for shape, layers in first + rest]


def entries(sets: list[str]) -> list[Entry]:
    """Everything in the named sets: the queues, 20 random modules over ``weft.nn``, PyG's models, and modules with
    torch's own norms, dropout and attention, all of which are stacked."""
    found = [entry for name in QUEUES for entry in queue(name)] if "queues" in sets else []
    named = {"modules": ([f"random-{seed}" for seed in range(MODULES)], MODULE_SHAPES)}
    named |= {"opaque": (list(OPAQUE), OPAQUE_SHAPES), "users": (list(NAMES), USERS_SHAPES)}
    for kind, (models, shapes) in named.items():
        if kind in sets:
            found += [
                Entry(kind, kind, shapes[place % len(shapes)], model, seed=place)
                for place, model in enumerate(models)
            ]  # fmt: skip
    return found
