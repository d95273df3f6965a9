"""PyG's training loop for the tasks that Weft trains: the same architecture, optimizer and selection.

Written as PyG's examples are: dense features, ``GCNConv(cached=True)``, ``F.dropout`` on the input, Adam, an
evaluation after every epoch (or only after the last), the test accuracy of the best validation epoch.
Shapes: N nodes, F features, C classes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.baselines.epochs import dense_features
from weft.core.task import Task
from weft.graph.graph import Graph

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
    from torch_geometric.nn import GATConv, models

    attention = {"heads": task.heads, "act": "elu"}
    build, options = {
        "gcn": (models.GCN, {"cached": True}),
        "sage": (models.GraphSAGE, {}),
        "gin": (models.GIN, {}),
        "gat": (models.GAT, attention),
    }[task.model]
    body = build(
        in_features, task.hidden, task.layers, out_features,
        dropout=task.dropout, **NORMS[task.norm], **options,
    )  # fmt: skip
    if task.model == "gat":
        body.convs[-1] = GATConv(task.hidden, out_features, heads=task.out_heads, concat=False, dropout=task.dropout)
    return InputDropout(body, task.input_dropout or 0.0)


def make_optimizer(task: Task, net: InputDropout) -> torch.optim.Optimizer:
    """Adam with weight decay on all layers or on the first alone."""
    if task.decay == "all":
        return torch.optim.Adam(net.parameters(), lr=task.lr, weight_decay=task.weight_decay)
    first = list(net.body.convs[0].parameters())
    chosen = {id(parameter) for parameter in first}
    rest = [parameter for parameter in net.parameters() if id(parameter) not in chosen]
    groups = [{"params": first, "weight_decay": task.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.Adam(groups, lr=task.lr)


def train_pyg(task: Task, graph: Graph, x: Tensor | None = None, edge_index: Tensor | None = None) -> Outcome:
    """Train ``task`` on ``graph`` with PyG on the device of the graph; ``x`` and edges as given or made."""
    x = dense_features(graph) if x is None else x
    edge_index = graph.edge_index() if edge_index is None else edge_index
    torch.manual_seed(task.seed)
    start = time.perf_counter()
    net = pyg_net(task, graph.num_features, graph.num_classes).to(graph.device)
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
    return Outcome(best_val, best_test, epoch, time.perf_counter() - start)


@torch.no_grad()
def evaluate(net: nn.Module, x: Tensor, edge_index: Tensor, graph: Graph) -> tuple[float, float]:
    """Accuracy on the validation and on the test nodes."""
    net.eval()
    right = net(x, edge_index).argmax(-1) == graph.y
    shares = torch.stack([right[rows].float().mean() for rows in (graph.val, graph.test)])
    val, test = shares.tolist()
    return val, test
