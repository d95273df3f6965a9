"""What Weft is compared with: the same training epoch in PyG, eager and compiled, and over cuSPARSE.

Nothing here is slower than it has to be:

- graphs are augmented and normalised once, before training, as PyG's documentation asks
  (``AddSelfLoops``/``GCNNorm`` first, ``add_self_loops=False``/``normalize=False`` in the layers);
- the loss takes rows by number, since a boolean mask would make the host wait for the device;
- ``torch.compile(model, dynamic=False)``, which PyG recommends where the graph never changes; with
  ``mode="reduce-overhead"`` as well, which replays CUDA graphs: its inputs are marked as staying where they are;
- edges come in whichever order (by source, as PyG's datasets do, or by destination) is faster.

An epoch is: forward with dropout, cross-entropy on the training nodes, backward, one Adam step.
Shapes: N nodes, E edges, F features, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.baselines.cusparse_models import SparseGNN, SparseGraph
from weft.graph.data.graph import Graph
from weft.graph.data.sparse_features import SparseFeatures

MODELS = ("gcn", "sage", "gin", "gat")
Epoch = Callable[[], None]


@dataclass(frozen=True)
class Setting:
    """The architecture and the optimizer, the same for every side."""

    layers: int
    hidden: int = 64
    heads: int = 4  # GAT: hidden is shared among the heads; the last layer averages as many
    dropout: float = 0.5
    lr: float = 0.01


def dense_features(graph: Graph) -> Tensor:
    """``x [N, F]`` with its zeros, as PyG's layers take it."""
    return graph.x.to_dense() if isinstance(graph.x, SparseFeatures) else graph.x


def training_epoch(
    model: nn.Module, call: Callable[[], Tensor], graph: Graph, optimizer: torch.optim.Optimizer
) -> Epoch:
    """The epoch as the documentation's loops write it; ``call()`` gives the logits ``[N, C]``."""
    rows, target = graph.train, graph.y[graph.train]
    model.train()

    def epoch() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(call()[rows], target)
        loss.backward()
        optimizer.step()

    return epoch


# ---- PyG ---------------------------------------------------------------------------------------------


def ordered_edges(graph: Graph, order: str) -> Tensor:
    """``edge_index [2, E]`` sorted by ``"source"`` or by ``"destination"``."""
    edge_index = graph.edge_index()
    if order == "destination":
        return edge_index
    return edge_index[:, torch.sort(edge_index[0], stable=True).indices]


def pyg_model(name: str, graph: Graph, setting: Setting) -> nn.Module:
    """PyG's own model with the options that leave augmentation to the caller."""
    from torch_geometric.nn import models

    build, options = {
        "gcn": (models.GCN, {"normalize": False}),
        "sage": (models.GraphSAGE, {}),
        "gin": (models.GIN, {}),
        "gat": (models.GAT, {"heads": setting.heads, "add_self_loops": False, "act": "elu"}),
    }[name]
    model = build(
        graph.num_features,
        setting.hidden,
        setting.layers,
        graph.num_classes,
        dropout=setting.dropout,
        **options,
    )
    return model.to(graph.device)


def pyg_inputs(name: str, graph: Graph, edge_index: Tensor) -> tuple[Tensor, ...]:
    """What the model takes after ``x``: edges with the loops and weights that its layers need."""
    from torch_geometric.nn.conv.gcn_conv import gcn_norm
    from torch_geometric.utils import add_self_loops, remove_self_loops

    if name == "gcn":
        return gcn_norm(edge_index, num_nodes=graph.num_nodes)
    if name == "gat":
        edge_index = remove_self_loops(edge_index)[0]
        edge_index = add_self_loops(edge_index, num_nodes=graph.num_nodes)[0]
    return (edge_index,)


def pyg_epoch(
    name: str,
    graph: Graph,
    setting: Setting,
    *,
    compiled: bool = False,
    mode: str | None = None,
    order: str = "source",
) -> Epoch:
    """One epoch of PyG's BasicGNN, eager or under ``torch.compile`` (in ``mode``: None is its default)."""
    model = pyg_model(name, graph, setting)
    x, rest = dense_features(graph), pyg_inputs(name, graph, ordered_edges(graph, order))
    optimizer = torch.optim.Adam(model.parameters(), lr=setting.lr)
    forward = compile_static(model, (x, *rest), mode) if compiled else model
    return training_epoch(model, lambda: forward(x, *rest), graph, optimizer)


def compile_static(model: nn.Module, inputs: tuple[Tensor, ...], mode: str | None) -> Callable[..., Tensor]:
    """``model`` compiled for ``inputs`` that never change; a replayed graph then reads them where they are."""
    if mode == "reduce-overhead":
        for tensor in inputs:
            torch._dynamo.mark_static_address(tensor)
    return torch.compile(model, dynamic=False, mode=mode)


# ---- cuSPARSE ----------------------------------------------------------------------------------------


def cusparse_epoch(name: str, graph: Graph, setting: Setting) -> Epoch:
    """One epoch of the same model over torch's CSR products (cuSPARSE on a GPU), with the fused Adam."""
    sizes = [graph.num_features, *[setting.hidden] * (setting.layers - 1), graph.num_classes]
    model = SparseGNN(name, sizes, setting.heads, setting.dropout).to(graph.device)
    x, matrix = dense_features(graph), SparseGraph(name, graph.adj)
    optimizer = torch.optim.Adam(model.parameters(), lr=setting.lr, fused=True)
    return training_epoch(model, lambda: model(x, matrix), graph, optimizer)
