"""Weights over sparse features lie transposed: the same numbers, fewer copies, the same checkpoints."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.dry_runs import capture
from tests.graphs_for_tests import tiny_graph
from tests.stacks import MODELS, best_tensors, start, tasks_of
from weft.core.task import Task
from weft.engine.run import run
from weft.runtime.step.forward import layout_of
from weft.runtime.step.members import Members

WIDTHS = ([{"hidden": 8}], [{"hidden": 8, "seed": 1}, {"hidden": 4, "lr": 0.1}])  # alone, and one of them padded


def as_they_are(monkeypatch):
    """From here on nothing is transposed."""
    monkeypatch.setattr(Members, "_over_sparse_features", lambda self, layout: [])


def trained(graph, model, members, epochs, saved=None):
    run = start(tasks_of(graph, members, model=model, dropout=0.5, weight_decay=0.01, epochs=6), graph)
    if saved is not None:
        run.restore(saved)
    run.advance(epochs)
    return run


def test_views_and_order():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    plain = layout_of(model, "all")
    turned = replace(plain, turned=("0.weight",))
    named = dict(model.named_parameters())
    flat = turned.flatten(named)
    assert all(torch.equal(value, named[name]) for name, value in turned.named(flat).items())
    assert torch.equal(flat[:12].view(4, 3), model[0].weight.T)
    assert torch.equal(turned.in_order(flat), plain.flatten(named))
    assert torch.equal(turned.laid_out(turned.in_order(flat)), flat)
    copies = turned.copies(torch.stack([flat, flat + 1.0]))
    assert torch.equal(copies[0][1], model[0].weight + 1.0)


@pytest.mark.parametrize("members", WIDTHS)
@pytest.mark.parametrize("model", MODELS)
def test_training_is_the_same_to_the_bit(model, members, monkeypatch):
    graph = tiny_graph(sparse=True)
    found = trained(graph, model, members, 4)
    assert all(stack.members.layout.turned for stack in found.stacks)
    as_they_are(monkeypatch)
    expected = trained(graph, model, members, 4)
    for index in range(len(members)):
        mine, theirs = best_tensors(found, index), best_tensors(expected, index)
        assert all(torch.equal(mine[name], theirs[name]) and mine[name].is_contiguous() for name in theirs)
    check_equal(found.tensors(), expected.tensors())


def check_equal(mine, theirs):
    """Checkpoints, apart from torch's own generator, which a run does not reset."""
    assert mine.keys() == theirs.keys()
    for name in theirs:
        if not name.startswith("random"):
            torch.testing.assert_close(mine[name], theirs[name], rtol=0.0, atol=0.0, equal_nan=True, msg=name)


@pytest.mark.parametrize("members", WIDTHS)
def test_checkpoints_do_not_depend_on_it(members, monkeypatch):
    graph = tiny_graph(sparse=True)
    turned = trained(graph, "sage", members, 2).tensors()
    whole = trained(graph, "sage", members, 4).tensors()
    as_they_are(monkeypatch)
    plain = trained(graph, "sage", members, 2).tensors()
    check_equal(turned, plain)
    check_equal(trained(graph, "sage", members, 2, saved=turned).tensors(), whole)
    monkeypatch.undo()
    check_equal(trained(graph, "sage", members, 2, saved=plain).tensors(), whole)


@pytest.mark.parametrize("model", ["gcn", "sage", "gin"])
@pytest.mark.parametrize("tasks", [1, 4])
def test_no_copy_of_these_weights_or_of_their_gradients(model, tasks, monkeypatch):
    graph = tiny_graph(sparse=True)
    task = Task(graph=graph, model=model, hidden=8)
    found = capture(task, graph, "cuda", tasks=tasks).program
    as_they_are(monkeypatch)
    before = capture(task, graph, "cuda", tasks=tasks).program
    weights = 2 if model == "sage" else 1
    assert launches(before) - launches(found) == 2 * weights + weights  # forward, backward; and in the evaluation


def launches(program) -> int:
    return sum(operator.launches for operator in program.operators)


def test_dense_features_are_multiplied_by_weights_as_they_are():
    (stack,) = start(tasks_of(tiny_graph(), [{}], model="gcn"), tiny_graph()).stacks
    assert stack.members.layout.turned == ()


class FlatStep(torch.optim.Optimizer):
    """As many are written: parameters and gradients as one row of numbers each."""

    def __init__(self, params, lr=0.1, weight_decay=0.0):
        assert weight_decay == 0.0
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.view(-1).sub_(p.grad.view(-1), alpha=group["lr"])


def test_an_optimizer_of_ones_own_finds_contiguous_parameters():
    graph, losses = tiny_graph(sparse=True), []
    for optimizer in (FlatStep, torch.optim.SGD):
        about = {"hidden": 8, "epochs": 4, "dropout": 0.0, "lr": 0.1, "weight_decay": 0.0, "optimizer": optimizer}
        losses.append(run(Task(graph=graph, model="gcn", **about), device="cpu", progress=False).history["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
