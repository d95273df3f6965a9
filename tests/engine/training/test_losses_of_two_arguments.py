"""Losses of torch, and functions of an output and labels: as in a plain loop, per member, stacked, or refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import weft
from tests.graphs_for_tests import tiny_graph
from weft.core.errors import SpecError
from weft.graph.graph import Graph

EPOCHS = 6


class Net(nn.Module):
    """One hidden layer of nodes alone."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.first, self.last = nn.Linear(in_features, 8), nn.Linear(8, out_features)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def regression(columns: int) -> Graph:
    """Numbers to predict, one or several per node."""
    graph = tiny_graph()
    y = graph.x[:, :columns] * 2 + 0.3
    fields = {"x": graph.x, "y": y, "train": graph.train, "val": graph.val, "test": graph.test}
    return Graph.from_edges(*graph.edge_index(), graph.num_nodes, **fields)


def own(output, y):
    return ((1 - output.softmax(-1).gather(1, y[:, None])) ** 2).mean()


def gained(output, y, gain=3.0):
    return gain * F.cross_entropy(output, y)


class Margin(nn.Module):
    """A loss that is a module, with a tensor of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, output, y):
        return F.multi_margin_loss(self.scale * output, y)


WEIGHT = torch.tensor([1.0, 2.0, 0.5])
CLASSES = {
    "module": nn.CrossEntropyLoss(),
    "smooth": nn.CrossEntropyLoss(label_smoothing=0.1, weight=WEIGHT),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "function": F.cross_entropy,
    "partial": partial(F.cross_entropy, label_smoothing=0.2),
    "own": own,
    "default": gained,
    "own module": Margin(),
}
CASES = {name: (tiny_graph(), loss) for name, loss in CLASSES.items()}
CASES |= {"labels": (tiny_graph(multilabel=True), nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 1.0, 3.0])))}
CASES |= {f"mse {columns}": (regression(columns), nn.MSELoss()) for columns in (1, 3)}
CASES |= {f"function {columns}": (regression(columns), F.mse_loss) for columns in (1, 3)}
CASES |= {"squeezed": (regression(1), lambda output, y: F.l1_loss(output.squeeze(-1), y))}
CASES |= {"column": (regression(1), lambda output, y: (output[:, 0] - y).abs().mean())}


def plain_loop(graph, loss, seed, rate):
    """Training losses, and the validation loss after the last step."""
    torch.manual_seed(seed)
    net = Net(graph.num_features, graph.num_classes)
    optimizer, losses = torch.optim.Adam(net.parameters(), lr=rate), []
    column = graph.regression and graph.y.dim() == 1 and loss in (F.mse_loss, CASES["mse 1"][1])
    y = graph.y[:, None] if column else graph.y
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        value = loss(net(graph.x)[graph.train], y[graph.train])
        value.backward()
        optimizer.step()
        losses.append(value.item())
    with torch.no_grad():
        return losses, loss(net(graph.x)[graph.val], y[graph.val]).item()


@pytest.mark.parametrize("name", CASES)
def test_every_member_trains_as_in_a_plain_loop(name):
    graph, loss = CASES[name]
    sweep = weft.Sweep(graph, Net, lr=[0.05, 0.01], seed=[0, 1], objective=loss, epochs=EPOCHS)
    result = weft.run(sweep, device="cpu", progress=False)
    assert [len(plan.members) for plan in result.plan] == [4]
    for member in result:
        losses, validation = plain_loop(graph, loss, member.task.seed, member.task.lr)
        assert member.history["loss"] == pytest.approx(losses, rel=1e-5)
        assert member.history["val_loss"][-1] == pytest.approx(validation, rel=1e-5)


@pytest.mark.parametrize(
    ("graph", "loss", "words"),
    [
        (
            tiny_graph(),
            nn.CrossEntropyLoss(reduction="none"),
            r"returned a tensor \[24\]; expected one number; give it r",
        ),
        (
            tiny_graph(),
            nn.BCEWithLogitsLoss(),
            r"does not take an output \[24, 3\] and labels \[24\] of torch.int64: Tar",
        ),
        (regression(1), lambda output, y: ((output - y) ** 2).mean(), r"broadcasts to \[M, M\]; write output\.squeeze"),
    ],
)
def test_what_is_no_loss_of_these_labels_is_refused(graph, loss, words):
    with pytest.raises(SpecError, match=words):
        weft.run(weft.Task(graph, Net, objective=loss, epochs=2), device="cpu", progress=False)


def test_a_model_that_returns_more_needs_a_function_that_reads_it():
    class Two(Net):
        def forward(self, x):
            return super().forward(x), x.sum()

    with pytest.raises(SpecError, match=r"cross_entropy takes an output and labels, but the model returned tuple"):
        weft.run(weft.Task(tiny_graph(), Two, objective=F.cross_entropy, epochs=2), device="cpu", progress=False)


def test_a_metric_of_two_arguments():
    def share(output, y):
        return (output.argmax(-1) == y).float().mean()

    metrics = weft.run(weft.Task(tiny_graph(), Net, metric=share, epochs=2), device="cpu", progress=False).metrics
    assert 0 <= metrics["test_share"] <= 1
