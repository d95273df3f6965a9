"""What Weft is compared with: the same training epoch in PyG, eager, compiled and captured, and over cuSPARSE.

Nothing here is slower than it has to be:

- graphs are augmented and normalised once, before training, as PyG's documentation asks
  (``AddSelfLoops``/``GCNNorm`` first, ``add_self_loops=False``/``normalize=False`` in the layers);
- the loss takes rows by number, since a boolean mask would make the host wait for the device;
- ``torch.compile(model, dynamic=False)``, which PyG recommends where the graph never changes; with
  ``mode="reduce-overhead"`` as well, which replays CUDA graphs: its inputs are marked as staying where they are;
- the whole step (compiled model, loss, backward, fused capturable Adam) captured as one CUDA graph, for PyG and for
  cuSPARSE's models (``captured.py``);
- edges come in whichever order (by source, as PyG's datasets do, or by destination) is faster;
- in bf16 under ``torch.autocast``, in tf32 with torch's setting for products, as their documentation has it.

An epoch is: forward with dropout, cross-entropy on the training nodes, backward, one Adam step.
Shapes: N nodes, E edges, F features, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.baselines.captured import CapturedEpoch, capturable_adam, captured
from benchmarks.baselines.cusparse_models import SparseGNN, SparseGraph
from benchmarks.harness.recorder import NotHere
from weft.graph.graph import Graph
from weft.graph.sparse_features import SparseFeatures

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


def adj_t_inputs(name: str, graph: Graph, edge_index: Tensor) -> tuple[Tensor, ...]:
    """The same as PyG's transposed sparse matrix, over which its layers multiply instead of gathering ``[E, F]``."""
    try:
        from torch_sparse import SparseTensor
    except (ImportError, OSError) as error:
        raise NotHere("PyG's adj_t path needs torch_sparse, which is not installed") from error
    (src, dst), *weights = pyg_inputs(name, graph, edge_index)
    size = (graph.num_nodes, graph.num_nodes)
    return (SparseTensor(row=dst, col=src, value=weights[0] if weights else None, sparse_sizes=size),)


def autocast(precision: str, device: torch.device) -> Callable[[], AbstractContextManager]:
    """What a forward pass in ``precision`` is inside of; casts are not cached: a captured step could not reuse them."""
    if precision != "bf16":
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


def pyg_forward(
    name: str,
    graph: Graph,
    setting: Setting,
    *,
    compiled: bool = False,
    mode: str | None = None,
    order: str = "source",
    precision: str = "fp32",
    adj_t: bool = False,
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """PyG's BasicGNN, and a call of it that gives the logits ``[N, C]`` in float32.

    ``mode`` is ``torch.compile``'s, None for its default. tf32 is a setting of the process: the caller's.
    """
    model = pyg_model(name, graph, setting)
    make = adj_t_inputs if adj_t else pyg_inputs
    x, rest = dense_features(graph), make(name, graph, ordered_edges(graph, order))
    forward = compile_static(model, (x, *rest), mode) if compiled else model
    inside = autocast(precision, graph.device)

    def call() -> Tensor:
        with inside():
            return forward(x, *rest).float()

    return model, call


def pyg_epoch(name: str, graph: Graph, setting: Setting, **how: object) -> Epoch:
    """One epoch of PyG's BasicGNN as its documentation writes it; ``how`` as in :func:`pyg_forward`."""
    model, call = pyg_forward(name, graph, setting, **how)
    return training_epoch(model, call, graph, torch.optim.Adam(model.parameters(), lr=setting.lr))


def pyg_captured(name: str, graph: Graph, setting: Setting, *, compiled: bool = True, **how: object) -> CapturedEpoch:
    """One epoch of PyG's BasicGNN, compiled, with its whole step captured as one CUDA graph."""
    model, call = pyg_forward(name, graph, setting, compiled=compiled, **how)
    return captured(model, call, graph.train, graph.y[graph.train], capturable_adam(model, setting.lr))


def compile_static(model: nn.Module, inputs: tuple[Tensor, ...], mode: str | None) -> Callable[..., Tensor]:
    """``model`` compiled for ``inputs`` that never change; a replayed graph then reads them where they are."""
    if mode == "reduce-overhead":
        for tensor in inputs:
            torch._dynamo.mark_static_address(tensor)
    return torch.compile(model, dynamic=False, mode=mode)


# ---- cuSPARSE ----------------------------------------------------------------------------------------


def cusparse_forward(name: str, graph: Graph, setting: Setting) -> tuple[nn.Module, Callable[[], Tensor]]:
    """The same model over torch's CSR products (cuSPARSE on a GPU), and a call of it."""
    sizes = [graph.num_features, *[setting.hidden] * (setting.layers - 1), graph.num_classes]
    model = SparseGNN(name, sizes, setting.heads, setting.dropout).to(graph.device)
    x, matrix = dense_features(graph), SparseGraph(name, graph.adj)
    return model, lambda: model(x, matrix)


def cusparse_epoch(name: str, graph: Graph, setting: Setting) -> Epoch:
    """One epoch over cuSPARSE with the fused Adam, eager."""
    model, call = cusparse_forward(name, graph, setting)
    return training_epoch(model, call, graph, torch.optim.Adam(model.parameters(), lr=setting.lr, fused=True))


def cusparse_captured(name: str, graph: Graph, setting: Setting) -> CapturedEpoch:
    """One epoch over cuSPARSE with its whole step captured as one CUDA graph."""
    model, call = cusparse_forward(name, graph, setting)
    return captured(model, call, graph.train, graph.y[graph.train], capturable_adam(model, setting.lr))
