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


class Mean(torch.nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(features, classes)

    def forward(self, x, edge_index):
        source, target = edge_index
        return self.linear(x + torch.zeros_like(x).index_add(0, target, x[source]))


LOSSES = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.3},
    "weighted": {"class_weights": [0.5, 1.0, 4.0]},
    "smoothed and weighted": {"label_smoothing": 0.3, "class_weights": [0.5, 1.0, 4.0]},
}
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("model", ["gcn", Mean], ids=["built-in", "own"])
@pytest.mark.parametrize("settings", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("mode", ["full", "sampled"])
def test_losses_of_splits_are_those_that_are_trained(mode, settings, model, device):
    """``train_loss``, ``val_loss`` and ``test_loss`` have the weights and the smoothing of ``loss``, stacked or not."""
    graph = small()
    own = {"hidden": 4, "dropout": 0.0} if model == "gcn" else {}
    sampling = {"batch": 5, "fanout": [30, 30]} if mode == "sampled" else {}
    for seeds in ([0], [0, 1]):
        sweep = weft.Sweep(graph, model, epochs=1, lr=0.1, mode=mode, seed=seeds, **own, **sampling, **settings)
        for member in weft.run(sweep, device=device, progress=False):
            logits = member.predict_logits(device="cpu")
            for split in ("train", "val", "test"):
                rows, weight = getattr(graph, split), torch.tensor(settings.get("class_weights", [1.0] * 3))
                expected = F.cross_entropy(
                    logits[rows], graph.y[rows], weight, label_smoothing=settings.get("label_smoothing", 0.0)
                )
                found = member.history[f"{split}_loss"][0]
                assert found == pytest.approx(expected.item(), rel=1e-4), (split, member.name)


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
