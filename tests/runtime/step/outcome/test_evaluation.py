"""Losses and metrics of the splits are means over their nodes, whatever the metric, down to a single node."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import weft
from tests.stacks import start


def small(train: int = 10) -> weft.Graph:
    draw = np.random.default_rng(0)
    src, dst = draw.integers(0, 30, (2, 90))
    splits = {"train": np.arange(train), "val": np.arange(10, 18), "test": np.arange(18, 30)}
    x, y = draw.normal(size=(30, 5)).astype("float32"), draw.integers(0, 3, 30)
    return weft.Graph.from_edges(src, dst, num_nodes=30, x=x, y=y, directed=False, **splits)


@pytest.mark.parametrize("metric", ["accuracy", "f1_micro", "f1_macro"])
@pytest.mark.parametrize("train", [10, 1])
def test_losses_of_splits_are_means_over_their_nodes(metric, train):
    graph = small(train)
    tasks = [weft.Task(graph=graph, hidden=4, dropout=0.0, epochs=2, metric=metric, seed=seed) for seed in (0, 1)]
    group = start(tasks, graph, join="stacked")
    (stack,) = group.stacks
    group.advance(1)
    logits = stack.logits(stack.state.flat, stack.source.example())
    for row in range(2):
        found = dict(zip(stack.columns, stack.state.history[row, 0].tolist(), strict=True))
        for split in ("train", "val", "test"):
            rows = getattr(graph, split)
            expected = F.cross_entropy(logits[row][rows], graph.y[rows]).item()
            assert found[f"{split}_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_one_training_node_trains_as_in_torch(smoothing):
    graph = small(train=1)
    task = weft.Task(graph=graph, hidden=4, dropout=0.0, epochs=3, lr=0.05, label_smoothing=smoothing)
    result = weft.run(task, device="cpu", progress=False)
    model = weft.nn.build("gcn", 5, 3, hidden=4, dropout=0.0, layers=2)
    weft.nn.reset_parameters(model, 0)
    update = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        update.zero_grad()
        logits = model(graph.x, graph.adj)[graph.train]
        loss = F.cross_entropy(logits, graph.y[graph.train], label_smoothing=smoothing)
        loss.backward()
        update.step()
        losses.append(loss.item())
    assert result.history["loss"] == pytest.approx(losses, rel=1e-4)
