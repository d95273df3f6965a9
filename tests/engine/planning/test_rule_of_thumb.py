"""The rule of thumb for a group's memory is near the captured estimate, and seldom below it."""

from __future__ import annotations

import pytest

from weft.core.models import MODELS
from weft.core.task import Task
from weft.engine.planning.estimator import Estimator
from weft.planner.cost.rule_of_thumb import memory
from weft.planner.machine_profiles import profile


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("count", "norm"), [(1, None), (8, None), (8, "batch"), (8, "layer")])
def test_near_the_captured_estimate(model, count, norm):
    common = {"model": model, "layers": 3, "hidden": 64, "heads": 4, "norm": norm}
    tasks = [Task(graph="shape:ogbn-arxiv", name=f"t{i}", **common) for i in range(count)]
    estimator = Estimator(profile("h200"))
    rule = memory(tasks, estimator.stats(tasks[0]), "cuda")
    assert 0.9 < rule / estimator.group_bytes(tasks) < 1.75
