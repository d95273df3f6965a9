"""Task.select: which epoch is the best, whose weights are the result, and when patience is over."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

import weft
from tests.graphs_for_tests import tiny_graph
from tests.runtime.loop.plain_loop import Net
from tests.runtime.loop.test_plain_torch import regression_graph

EPOCHS, LR = 60, 0.1


def accuracy(output, y):
    return float((output.argmax(-1) == y).float().mean())


def r2(output, y):
    return 1 - float((output.view_as(y) - y).square().sum() / (y - y.mean()).square().sum())


def train_plainly(graph, select="val_accuracy", patience=None, every=1, epochs=EPOCHS):
    """Epochs trained, the best one (from 1) and its weights, of a loop as one writes it with torch alone."""
    torch.manual_seed(0)
    loss = (lambda a, b: F.mse_loss(a.view_as(b), b)) if graph.regression else F.cross_entropy
    score = r2 if graph.regression else accuracy
    net = Net(graph.num_features, graph.num_classes)
    optimizer = torch.optim.Adam(net.parameters(), lr=LR)
    best, best_epoch, weights, epoch = -math.inf, 0, {}, 0
    while epoch < epochs and not (patience and epoch - best_epoch >= patience):
        epoch += 1
        optimizer.zero_grad()
        loss(net(graph.x)[graph.train], graph.y[graph.train]).backward()
        optimizer.step()
        if epoch % every and epoch < epochs:
            continue
        with torch.no_grad():
            part, _, what = select.partition("_")
            rows = graph.val if part == "last" else getattr(graph, part)
            output, y = net(graph.x)[rows], graph.y[rows]
        value = epoch if select == "last" else -float(loss(output, y)) if what == "loss" else score(output, y)
        if value > best:
            best, best_epoch = value, epoch
            weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    return epoch, best_epoch, weights


def assert_same(result, plain):
    epochs, best, weights = plain
    assert (result.metrics["epochs_run"], result.metrics["best_epoch"]) == (epochs, best)
    for name, weight in result.model.named_parameters():
        torch.testing.assert_close(weight.detach(), weights[name], rtol=1e-3, atol=5e-5)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("patience", [None, 6])
@pytest.mark.parametrize("select", ["val_loss", "train_loss", "val_accuracy", "test_accuracy", "last"])
def test_equal_to_a_plain_loop(select, patience, every):
    graph = tiny_graph()
    if select == "last" and patience:
        return
    task = weft.Task(graph=graph, model=Net, lr=LR, epochs=EPOCHS, select=select, patience=patience, eval_every=every)
    assert_same(weft.run(task, progress=False), train_plainly(graph, select, patience, every))


def test_the_default_is_the_validation_metric():
    graph = tiny_graph()
    result = weft.run(weft.Task(graph=graph, model=Net, lr=LR, epochs=EPOCHS), progress=False)
    assert_same(result, train_plainly(graph))
    least = weft.run(weft.Task(graph=graph, model=Net, lr=LR, epochs=EPOCHS, select="val_loss"), progress=False)
    assert least.metrics["best_epoch"] != result.metrics["best_epoch"], "the graph tells them apart"
    assert least.history == result.history


def test_of_numbers():
    """The metric is r2, of which more is better, whichever column decides."""
    graph = regression_graph()
    for select in ("val_loss", "val_r2", "train_r2"):
        task = weft.Task(graph=graph, model=Net, lr=LR, epochs=EPOCHS, select=select, patience=8)
        assert_same(weft.run(task, progress=False), train_plainly(graph, select, 8))


def losses_of(result, graph):
    """Validation loss and accuracy of the model of a result."""
    with torch.no_grad():
        output = result.model(graph.x, graph.adj)[graph.val]
    return float(F.cross_entropy(output, graph.y[graph.val])), accuracy(output, graph.y[graph.val])


@pytest.mark.parametrize("sampled", [{}, {"mode": "sampled", "fanout": [-1, -1], "batch": 7}])
def test_members_of_a_stack_differ_in_it(sampled):
    graph = tiny_graph()
    tasks = [
        weft.Task(graph=graph, hidden=8, dropout=0.5, lr=LR, epochs=EPOCHS, name=name, **own, **sampled)
        for name, own in {
            "loss": {"select": "val_loss", "patience": 5},
            "metric": {"patience": 5},
            "last": {"select": "last"},
            "train": {"select": "train_loss", "eval_every": 1},
        }.items()
    ]
    result = weft.run(tasks, progress=False)
    assert result.plan[0].join == "stacked"
    loss, metric, last, train = result
    for member, column, best in ((loss, "val_loss", min), (metric, "val_accuracy", max), (train, "train_loss", min)):
        history = member.history[column]
        assert member.metrics["best_epoch"] == history.index(best(history)) + 1
        assert member.metrics[column] == pytest.approx(best(history))
    for member in (loss, metric):
        assert member.metrics["epochs_run"] == min(member.metrics["best_epoch"] + 5, EPOCHS)
    assert last.metrics["best_epoch"] == last.metrics["epochs_run"] == EPOCHS
    for member in result:
        found = losses_of(member, graph)
        assert found == pytest.approx((member.metrics["val_loss"], member.metrics["val_accuracy"]), abs=1e-5)


def test_resumed_is_uninterrupted(tmp_path):
    task = weft.Task(graph=tiny_graph(), hidden=8, dropout=0.5, lr=LR, epochs=EPOCHS, select="val_loss", patience=20)
    whole, control = weft.run(task, progress=False), weft.Control()

    def leave(event):
        if event.kind == "rows":  # after the first epoch; it takes effect a few epochs later
            control.preempt()

    assert weft.run(task, progress=False, out=tmp_path, control=control, on_event=leave).status == "preempted"
    control.resume()
    second = weft.run(task, progress=False, out=tmp_path, control=control, resume=True)
    assert (second.history, second.metrics["best_epoch"]) == (whole.history, whole.metrics["best_epoch"])
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], weight)


def test_what_is_refused():
    graph = tiny_graph()
    with pytest.raises(weft.InputError, match=r"select='val_f1' is not measured; set it to one of loss, train_loss"):
        weft.run(weft.Task(graph=graph, hidden=8, select="val_f1"), progress=False)
    with pytest.raises(weft.InputError, match=r"patience=5 would have no effect: select='last' takes the weights"):
        weft.run(weft.Task(graph=graph, hidden=8, select="last", patience=5), progress=False)
    with pytest.raises(weft.InputError, match="did you mean 'select'"):
        weft.Task(graph=graph, monitor="val_loss")


def test_a_spec_file_takes_it(tmp_path):
    spec = tmp_path / "spec.toml"
    spec.write_text('graph = "demo"\n[train]\nepochs = 5\nselect = ["val_loss", "last"]\n')
    assert [task.select for task in weft.read(spec).tasks()] == ["val_loss", "last"]
