"""The bound on a very small task's memory: never below what a dry run finds, on any machine that is known."""

from __future__ import annotations

import pytest

import weft
from weft.engine.base.graph_cache import Graphs
from weft.engine.base.machines import find_machine, load_calibration
from weft.engine.planning.estimator import Estimator
from weft.serve.workers.quick_estimates import quick_estimate


@pytest.mark.parametrize("machine", ["h200", "a100-80g", "v100-32g", "cpu"])
@pytest.mark.parametrize(
    "given",
    [
        {"model": "gcn", "hidden": 4},
        {"model": "sage", "hidden": 64, "layers": 3, "norm": "batch"},
        {"model": "gin", "hidden": 16},
        {"model": "gat", "hidden": 8, "heads": 8},
    ],
    ids=lambda given: given["model"],
)
def test_a_bound_is_no_less_than_what_a_dry_run_finds(given, machine):
    task = weft.Task(graph="demo", epochs=20, **given)
    known = find_machine(machine)
    estimator = Estimator(known, load_calibration(known), Graphs([task]))
    quick = quick_estimate(task, estimator)
    assert quick is not None
    found, plan = quick
    assert plan.cost["total_bytes"] == found["bytes"] >= estimator.alone(task).cost.total_bytes
