"""The rule of thumb for a group's memory is near the captured estimate, and seldom below it."""

from __future__ import annotations

import pytest

from weft.core.models import MODELS, traits_of
from weft.core.task import Task
from weft.engine.estimator import Estimator
from weft.planner.cost.rule import rule_memory
from weft.planner.machine_profiles import profile


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("count", "norm"), [(1, None), (8, None), (8, "batch"), (8, "layer")])
def test_near_the_captured_estimate(model, count, norm):
    relational = traits_of(model).relational
    common = {"model": model, "layers": 3, "hidden": 64, "heads": 4, "norm": norm}
    graph = "shape:bgs" if relational else "shape:ogbn-arxiv"
    tasks = [Task(graph=graph, name=f"t{i}", **common) for i in range(count)]
    estimator = Estimator(profile("h200"))
    rule = rule_memory(tasks, estimator.stats(tasks[0]), "cuda")
    low, high = (0.8, 2.0) if relational else (0.9, 1.75)
    assert low < rule / estimator.group_bytes(tasks) < high
