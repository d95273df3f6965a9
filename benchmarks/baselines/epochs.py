"""What Weft is compared with: the same training epoch in PyG, eager, compiled and captured, and over cuSPARSE.

Nothing here is slower than it has to be:

- graphs are augmented and normalised once, before training, as PyG's documentation asks
  (``AddSelfLoops``/``GCNNorm`` first, ``add_self_loops=False``/``normalize=False`` in the layers);
- the loss takes rows by number, since a boolean mask would make the host wait for the device;
- ``torch.compile(model, dynamic=False)``, which PyG recommends where the graph never changes;
- the whole step (compiled model, loss, backward, fused capturable Adam) captured as one CUDA graph, for PyG and for
  cuSPARSE's models;
- edges come in whichever order (by source, as PyG's datasets do, or by destination) is faster;
- in bf16 under ``torch.autocast``, in tf32 with torch's setting for products, as their documentation has it.

An epoch is: forward with dropout, cross-entropy on the training nodes, backward, one Adam step.
Shapes: N nodes, E edges, F features, C classes.

:func:`train_pyg` is PyG's whole loop of a task, written as PyG's examples are: dense features,
``GCNConv(cached=True)``, dropout on the input, Adam, and the test accuracy of the best validation epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.baselines.cusparse import SparseGNN, SparseGraph
from benchmarks.harness.timing import record_graph
from weft.core.task import Task
from weft.graph.graph import Graph
from weft.graph.sparse_features import SparseFeatures

Step = Callable[[], None]
WARM_UP = 5  # the first compiles, the others let Adam make its state and libraries their workspaces


@dataclass(frozen=True)
class CapturedEpoch:
    """``train()`` replays the step, ``eager()`` runs it without the recording; ``note``: whether it was captured."""

    train: Step
    eager: Step
    note: dict[str, Any]


def capturable_adam(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Fused Adam whose step count is on the device, so that it can be captured; a CPU has the fused one alone."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    return torch.optim.Adam(model.parameters(), lr=lr, fused=True, capturable=on_gpu)


def captured(
    model: nn.Module,
    call: Callable[[], Tensor],
    rows: Tensor,
    target: Tensor,
    optimizer: torch.optim.Optimizer,
) -> CapturedEpoch:
    """The step of ``call() [N, C]`` with cross-entropy on ``rows``; raises if a GPU cannot capture it."""
    model.train()

    def step() -> None:
        # Gradients are None when the capture begins: backward then writes them anew in every replay.
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(call()[rows], target).backward()
        optimizer.step()

    if rows.device.type != "cuda":
        return CapturedEpoch(step, step, {"captured": False, "why_not": "a CPU has no CUDA graphs: the step is eager"})
    graph, _ = record_graph(step, warmup=WARM_UP)
    return CapturedEpoch(graph.replay, step, {"captured": True})


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


def basic_gnn(name: str, sizes: tuple[int, int, int, int], dropout: float, heads: int, **options: Any) -> nn.Module:
    """PyG's own model of ``sizes`` = (inputs, hidden, layers, outputs)."""
    from torch_geometric.nn import models

    attention = {"heads": heads, "act": "elu"} if name == "gat" else {}
    build = {"gcn": models.GCN, "sage": models.GraphSAGE, "gin": models.GIN, "gat": models.GAT}[name]
    return build(*sizes, dropout=dropout, **attention, **options)


def pyg_model(name: str, graph: Graph, setting: Setting) -> nn.Module:
    """PyG's own model with the options that leave augmentation to the caller."""
    options = {"gcn": {"normalize": False}, "gat": {"add_self_loops": False}}.get(name, {})
    sizes = (graph.num_features, setting.hidden, setting.layers, graph.num_classes)
    return basic_gnn(name, sizes, setting.dropout, setting.heads, **options).to(graph.device)


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
    order: str = "source",
    precision: str = "fp32",
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """PyG's BasicGNN, and a call of it that gives the logits ``[N, C]`` in float32.

    tf32 is a setting of the process: the caller's.
    """
    model = pyg_model(name, graph, setting)
    x, rest = dense_features(graph), pyg_inputs(name, graph, ordered_edges(graph, order))
    forward = torch.compile(model, dynamic=False) if compiled else model
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


NORMS: dict[str | None, dict[str, Any]] = {
    None: {},
    "batch": {"norm": "batch_norm"},
    "layer": {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}},
}


@dataclass(frozen=True)
class Outcome:
    """Accuracies at the best validation epoch, epochs run, and seconds of the loop."""

    val: float
    test: float
    epochs: int
    seconds: float


class InputDropout(nn.Module):
    """PyG's model with dropout on its input."""

    def __init__(self, body: nn.Module, rate: float) -> None:
        super().__init__()
        self.body, self.rate = body, rate

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Logits ``[N, C]``."""
        return self.body(F.dropout(x, self.rate, self.training), edge_index)


def pyg_net(task: Task, in_features: int, out_features: int) -> InputDropout:
    """The PyG model that equals the named model of ``task``."""
    from torch_geometric.nn import GATConv

    options = {**NORMS[task.norm], **({"cached": True} if task.model == "gcn" else {})}
    sizes = (in_features, task.hidden, task.layers, out_features)
    body = basic_gnn(task.model, sizes, task.dropout, task.heads, **options)
    if task.model == "gat":
        body.convs[-1] = GATConv(task.hidden, out_features, heads=task.out_heads, concat=False, dropout=task.dropout)
    return InputDropout(body, task.input_dropout or 0.0)


def make_optimizer(task: Task, net: nn.Module) -> torch.optim.Optimizer:
    """Adam with weight decay on all layers or on the first alone."""
    if task.decay == "all":
        return torch.optim.Adam(net.parameters(), lr=task.lr, weight_decay=task.weight_decay)
    first = list(net.body.convs[0].parameters())
    chosen = {id(parameter) for parameter in first}
    rest = [parameter for parameter in net.parameters() if id(parameter) not in chosen]
    groups = [{"params": first, "weight_decay": task.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.Adam(groups, lr=task.lr)


def train_pyg(
    task: Task,
    graph: Graph,
    x: Tensor | None = None,
    edge_index: Tensor | None = None,
    net: nn.Module | None = None,
    stops: Callable[[int, float], bool] = lambda epoch, val: False,
) -> Outcome:
    """Train ``task`` on ``graph`` with PyG on the device of the graph; ``x``, edges and model as given or made.

    ``stops`` is called with the accuracy on the validation nodes at every evaluated epoch, and may end the training.
    """
    x = dense_features(graph) if x is None else x
    edge_index = graph.edge_index() if edge_index is None else edge_index
    torch.manual_seed(task.seed)
    start = time.perf_counter()
    net = pyg_net(task, graph.num_features, graph.num_classes).to(graph.device) if net is None else net
    optimizer = make_optimizer(task, net)
    target = graph.y[graph.train]
    best_val, best_test, best_epoch, epoch = -1.0, 0.0, 0, 0
    for epoch in range(1, task.epochs + 1):
        net.train()
        optimizer.zero_grad()
        F.cross_entropy(net(x, edge_index)[graph.train], target).backward()
        optimizer.step()
        if epoch % task.eval_every and epoch != task.epochs:
            continue
        val, test = evaluate(net, x, edge_index, graph)
        if val > best_val:
            best_val, best_test, best_epoch = val, test, epoch
        elif task.patience is not None and epoch - best_epoch >= task.patience:
            break
        if stops(epoch, val):
            break
    return Outcome(best_val, best_test, epoch, time.perf_counter() - start)


@torch.no_grad()
def evaluate(net: nn.Module, x: Tensor, edge_index: Tensor, graph: Graph) -> tuple[float, float]:
    """Accuracy on the validation and on the test nodes."""
    net.eval()
    right = net(x, edge_index).argmax(-1) == graph.y
    shares = torch.stack([right[rows].float().mean() for rows in (graph.val, graph.test)])
    val, test = shares.tolist()
    return val, test
