"""PyG's loop of any task of a team's queue: whole graphs, sampled batches, relations, PyG's own classes, inference.

- Whole graphs: :func:`benchmarks.baselines.epochs.train_pyg`. Where the messages of an edge list would take more than
  ``MOST_MESSAGE_BYTES`` (reddit: 29 GB for 64 features, several times in a step) the same model runs over torch's CSR
  products (``benchmarks/baselines/cusparse.py``), as PyG's documentation advises for such graphs.
- Sampled: PyG's layers, eager, with fused Adam, on local subgraphs that Weft's sampler makes on the same device:
  PyG's own ``NeighborLoader`` needs libraries that have to be compiled. Nothing is evaluated, which favours PyG.
- Relations: ``RGCNConv`` with bases.
- Inference: one forward pass over the whole graph by a model of that structure.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.baselines.cusparse import SparseGNN, SparseGraph
from benchmarks.baselines.epochs import Outcome, basic_gnn, dense_features, pyg_net, train_pyg
from benchmarks.queue_runs.team import MODULE, pyg_module
from weft.batches.sampler import NeighbourSampler, SeedOrder
from weft.core.task import Task
from weft.graph.graph import Graph

MOST_MESSAGE_BYTES = 8 << 30


class RelationalNet(nn.Module):
    """``RGCNConv`` layers with relu and dropout between them, on edges whose types it keeps."""

    def __init__(self, task: Task, graph: Graph) -> None:
        from torch_geometric.nn import RGCNConv

        super().__init__()
        sizes = [graph.num_features, *[task.hidden] * (task.layers - 1), graph.num_classes]
        relations, bases = graph.num_relations, task.bases
        self.convs = nn.ModuleList(RGCNConv(a, b, relations, num_bases=bases) for a, b in pairwise(sizes))
        self.rate = task.dropout
        assert graph.relation is not None
        self.register_buffer("kinds", graph.relation.long(), persistent=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Logits ``[N, C]``."""
        for place, conv in enumerate(self.convs):
            x = x if place == 0 else F.dropout(torch.relu(x), self.rate, self.training)
            x = conv(x, edge_index, self.kinds)
        return x


class ProductNet(nn.Module):
    """The same model over CSR products, for a graph whose messages would not fit."""

    def __init__(self, task: Task, graph: Graph) -> None:
        super().__init__()
        sizes = [graph.num_features, *[task.hidden] * (task.layers - 1), graph.num_classes]
        self.net = SparseGNN(task.model, sizes, task.heads, task.dropout)
        self.matrix = SparseGraph(task.model, graph.adj)

    def forward(self, x: Tensor, edge_index: Tensor | None) -> Tensor:
        """Logits ``[N, C]``."""
        return self.net(x, self.matrix)


def net_of(task: Task, graph: Graph) -> nn.Module:
    """PyG's counterpart of the model of ``task``."""
    if task.model == MODULE:
        heads = task.heads if "heads" in task.given else None
        return pyg_module(graph.num_features, graph.num_classes, heads=heads, **task.model_args)
    if task.model == "rgcn":
        return RelationalNet(task, graph)
    if task.model == "gatv2":
        sizes = (graph.num_features, task.hidden, task.layers, graph.num_classes)
        return basic_gnn("gat", sizes, task.dropout, task.heads, v2=True)
    return (
        ProductNet(task, graph) if needs_products(task, graph) else pyg_net(task, graph.num_features, graph.num_classes)
    )


def needs_products(task: Task, graph: Graph) -> bool:
    """Whether the messages of one layer would take too many bytes."""
    return not task.sampled and task.model in ("gcn", "sage") and 4 * graph.num_edges * task.hidden > MOST_MESSAGE_BYTES


def train(task: Task, graph: Graph) -> Outcome:
    """Train ``task`` on ``graph``, which lies on the device."""
    if task.sampled:
        return train_sampled(task, graph)
    products = isinstance(task.model, str) and task.model != MODULE and needs_products(task, graph)
    edges = torch.empty(2, 0, dtype=torch.long, device=graph.device) if products else None
    torch.manual_seed(task.seed)
    return train_pyg(task, graph, edge_index=edges, net=net_of(task, graph).to(graph.device))


def train_sampled(task: Task, graph: Graph) -> Outcome:
    """Sampled batches of ``task``, without evaluation."""
    assert task.fanout is not None
    x = dense_features(graph)
    start = time.perf_counter()
    sampler = NeighbourSampler(graph, task.fanout, subgraph=True)
    order = SeedOrder(graph.train, task.batch)
    torch.manual_seed(task.seed)
    sizes = (graph.num_features, task.hidden, task.layers, graph.num_classes)
    net = basic_gnn(task.model, sizes, task.dropout, task.heads).to(graph.device)
    optimizer = torch.optim.Adam(net.parameters(), lr=task.lr, fused=graph.device.type == "cuda")
    net.train()
    for epoch in range(task.epochs):
        for seeds in order.epoch(epoch):
            local = sampler.sample(seeds.seeds, seeds.epoch, seeds.batch)
            optimizer.zero_grad()
            logits = net(x[local.nodes.long()], local.edge_index)[: local.num_seeds]
            F.cross_entropy(logits, graph.y[local.seeds.long()]).backward()
            optimizer.step()
    if graph.device.type == "cuda":
        torch.cuda.synchronize(graph.device)
    return Outcome(0.0, 0.0, task.epochs, time.perf_counter() - start)


@torch.no_grad()
def infer(task: Task, graph: Graph, nodes: list[int]) -> list[Any]:
    """The classes that a model of that structure gives ``nodes``."""
    net = net_of(task, graph).to(graph.device).eval()
    found: list[Any] = net(dense_features(graph), graph.edge_index())[nodes].argmax(-1).tolist()
    return found
