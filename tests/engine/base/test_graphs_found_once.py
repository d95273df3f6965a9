"""Graphs of plans and runs: found once, checked by one rule."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.graphs_for_tests import tiny_graph
from weft.core.errors import GraphError, SpecError
from weft.core.graph_stats import GraphStats
from weft.core.task import Task
from weft.engine.estimator import Estimator
from weft.engine.graphs import Graphs, check_trainable
from weft.graph.catalog import names as catalog
from weft.planner.machine_profiles import profile


def lacking(what):
    graph = tiny_graph()
    changes = {
        "features": {"x": None},
        "labels": {"y": None},
        "training nodes": {"train": torch.zeros(0, dtype=torch.int64)},
        "1 class": {"y": torch.zeros(graph.num_nodes, dtype=torch.int64)},
    }
    changed = graph._changed(**changes[what])
    changed._num_classes = None  # of the labels
    return changed


@pytest.mark.parametrize("what", ["features", "labels", "training nodes", "1 class"])
def test_a_plan_and_a_run_refuse_the_same_graphs_in_the_same_words(what):
    task = Task(graph=lacking(what), epochs=1)
    with pytest.raises(GraphError) as planned:
        weft.plan(task, machine="cpu")
    with pytest.raises(GraphError) as run:
        weft.run(task, device="cpu", progress=False)
    assert str(planned.value) == str(run.value)
    assert what in str(run.value)


def test_a_summary_is_checked_by_the_same_rule():
    fine = GraphStats("g", 10, 20, num_features=3, num_classes=2, num_train=4)
    check_trainable(Task(graph="g"), fine)
    with pytest.raises(SpecError, match="patience=3 needs validation nodes"):
        check_trainable(Task(graph="g", patience=3), fine)
    with pytest.raises(GraphError, match="has 1 class"):
        check_trainable(Task(graph="g"), GraphStats("g", 10, 20, num_features=3, num_classes=1, num_train=4))
    one_label = GraphStats("g", 10, 20, num_features=3, num_classes=1, multilabel=True, num_train=4)
    check_trainable(Task(graph="g"), one_label)


def test_a_graph_is_found_and_summarised_once(monkeypatch):
    found, graph = [], tiny_graph()
    monkeypatch.setattr(catalog, "load", lambda name, device: found.append(name) or graph)
    graphs = Graphs()
    estimator = Estimator(profile("cpu"), graphs=graphs)
    tasks = [Task(graph="mine", hidden=hidden) for hidden in (4, 8)]
    for task in tasks:
        check_trainable(task, graphs.summary(task))
        estimator.alone(task)
        assert estimator.stats(task) is graphs.stats(task)
    assert len(found) == 1
