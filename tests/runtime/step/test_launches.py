"""What a step of a small graph launches besides its own arithmetic: on a GPU launches are most of its time."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.dry_runs import capture
from tests.graphs_for_tests import tiny_graph
from weft.core.task import Task


def operators(**settings) -> Counter[str]:
    """How often each operator of a training step launches something, without the evaluation."""
    graph = tiny_graph(sparse=True)
    program = capture(Task(graph=graph, hidden=8, dropout=0.5, weight_decay=0.01, **settings), graph, "cuda").program
    found = Counter[str]()
    for one in program.operators:
        found[one.name] += one.launches if one.phase != "evaluation" else 0
    return +found


@pytest.mark.parametrize("model", ["gcn", "sage", "gin"])
def test_no_weight_is_copied(model):
    assert operators(model=model)["aten.clone"] == 0


def test_rates_are_looked_up_by_the_update():
    found = operators(model="gcn")
    assert found["aten.index_select"] == 0
    assert found["weft.adam_"] == 1
    assert operators(model="gcn", optimizer="sgd")["aten.index_select"] == 1


def test_the_loss_of_few_rows_is_one_launch():
    assert operators(model="gcn")["weft.cross_entropy_rows"] == 1


@pytest.mark.parametrize(("model", "launches"), [("gcn", 21), ("sage", 30), ("gin", 32), ("gat", 43)])
def test_all_of_a_step(model, launches):
    """An optimisation that is lost shows here; one that is found makes the number smaller."""
    assert operators(model=model).total() <= launches
