"""Objectives against torch's own losses, values and gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from weft.core.compatibility import metric_name
from weft.core.errors import SpecError
from weft.core.task import Task
from weft.graph.graph import Graph
from weft.runtime.step.losses import Objective, objective_of_stack


def objective_for(task: Task, multilabel: bool) -> Objective:
    """The objective of one task: losses without the dimension of tasks."""
    y = torch.zeros(20, 4) if multilabel else torch.arange(20) % 4
    graph = Graph.from_edges([0], [1], 20, y=y, name="g")
    stacked = objective_of_stack([task], graph, torch.device("cpu"))

    def loss(logits, labels, rows):
        return stacked.loss(logits[None], labels, rows)[0]

    return replace(stacked, loss=loss)


@pytest.fixture
def logits():
    return torch.randn(20, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()


ROWS = torch.tensor([1, 4, 5, 11, 19])


def compare(mine, theirs, logits):
    assert torch.allclose(mine, theirs, atol=1e-6)
    (a,) = torch.autograd.grad(mine, logits)
    (b,) = torch.autograd.grad(theirs, logits)
    assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_multiclass(logits, smoothing):
    labels = torch.arange(20) % 4
    objective = objective_for(Task(graph="g", label_smoothing=smoothing), multilabel=False)
    theirs = F.cross_entropy(logits[ROWS], labels[ROWS], label_smoothing=smoothing)
    compare(objective.loss(logits, labels, ROWS), theirs, logits)
    per_row = objective.per_row(logits[ROWS], labels[ROWS])
    expected = F.cross_entropy(logits[ROWS], labels[ROWS], reduction="none", label_smoothing=smoothing)
    assert torch.allclose(per_row, expected, atol=1e-6)


def test_multilabel(logits):
    labels = (torch.arange(80).reshape(20, 4) % 3 == 0).float()
    objective = objective_for(Task(graph="g"), multilabel=True)
    theirs = F.binary_cross_entropy_with_logits(logits[ROWS], labels[ROWS])
    compare(objective.loss(logits, labels, ROWS), theirs, logits)
    assert torch.allclose(objective.per_row(logits[ROWS], labels[ROWS]).mean(), theirs, atol=1e-6)


def test_an_objective_that_does_not_suit_the_labels():
    with pytest.raises(SpecError, match="objective='multilabel' does not suit graph 'g', which has one class"):
        objective_for(Task(graph="g", objective="multilabel"), multilabel=False)
    with pytest.raises(SpecError, match=r"label_smoothing=0\.1 is for multiclass"):
        objective_for(Task(graph="g", label_smoothing=0.1), multilabel=True)


def test_default_metrics():
    assert metric_name(Task(graph="g"), multilabel=False) == "accuracy"
    assert metric_name(Task(graph="g"), multilabel=True) == "f1_micro"
    assert metric_name(Task(graph="g", metric="roc_auc"), multilabel=True) == "roc_auc"
