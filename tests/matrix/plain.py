"""The plain loop of PyTorch that ``weft.run`` is compared with: whole graphs, and the same sampled batches."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import weft
from tests.behaviour.plain_loop import seed_all
from weft.batches import NeighbourSampler, SeedOrder
from weft.batches.block import local_adjacency


def first_weights(task: weft.Task, graph: weft.Graph) -> nn.Module:
    """The model of ``task`` before its first step."""
    if task.traits is None:
        from tests.matrix import modules

        seed_all(task.seed)
        kind = getattr(modules, task.model.rpartition(":")[2])
        return kind(graph.num_features, graph.num_classes, task.dropout)
    still = weft.run(task.with_values(epochs=1, lr=1e-30), device="cpu", progress=False)
    return copy.deepcopy(still.model)


def losses(task: weft.Task, graph: weft.Graph) -> list[float]:
    """The training loss of every epoch of ``task``, which has no dropout."""
    model = first_weights(task, graph)
    optimizer = torch.optim.Adam(model.parameters(), lr=task.lr)
    found = []
    for epoch in range(task.epochs):
        total = rows = 0.0
        for x, edges, labelled, y in batches(task, graph, epoch):
            model.train()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x, edges)[labelled], y)
            loss.backward()
            optimizer.step()
            total, rows = total + loss.item() * y.numel(), rows + y.numel()
        found.append(total / rows)
    return found


def batches(task: weft.Task, graph: weft.Graph, epoch: int) -> Any:
    """Features, edges as the model takes them, rows of the loss and their labels, per step of an epoch."""
    users, by_edges = task.traits is None, task.model.endswith(":Pyg")
    if not task.sampled:
        yield graph.x, graph.edge_index() if by_edges else graph.adj, graph.train, graph.y[graph.train]
        return
    how = {"subgraph": True, "degrees": "sampled"} if users else {"degrees": "full"}  # a user's module: one subgraph
    sampler = NeighbourSampler(graph, task.fanouts, seed=task.batch_seed, **how)
    for one in SeedOrder(graph.train, task.batch, task.batch_seed).epoch(epoch):
        batch = sampler.sample(one.seeds, one.epoch, one.batch)
        x, y = graph.x[batch.input_nodes.long()], graph.y[one.seeds.long()]
        if users:
            edges = batch.edge_index if by_edges else local_adjacency(batch)
        else:
            edges = tuple(block.adjacency() for block in batch.blocks)
        yield x, edges, slice(0, y.numel()), y
