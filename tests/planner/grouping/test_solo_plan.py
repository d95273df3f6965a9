"""Plans for one task: every decision has a reason, and none needs a GPU or torch."""

from __future__ import annotations

import json

import pytest

from tests.stacks import solo_plan
from weft.core.graph_stats import GraphStats
from weft.core.plan import Plan
from weft.core.task import Task

DENSE = GraphStats("g", num_nodes=1000, num_edges=5000, num_features=128)
SPARSE = GraphStats("g", num_nodes=1000, num_edges=5000, num_features=128, feature_nnz=900)


@pytest.mark.parametrize(
    ("settings", "stats", "first_layer", "reason"),
    [
        ({"model": "gcn"}, DENSE, "once", "0.5 MB kept"),
        ({"model": "sage"}, DENSE, "once", "do not change"),
        ({"model": "gin"}, DENSE, "once", "do not change"),
        ({"model": "gat"}, DENSE, "per_step", "attention depends on the weights"),
        ({"model": "gcn", "input_dropout": 0.5}, DENSE, "per_step", "input_dropout=0.5"),
        ({"model": "gcn"}, SPARSE, "per_step", "features are sparse"),
        ({"model": lambda i, o: None}, DENSE, "once", "if the model offers"),
    ],
)
def test_first_layer(settings, stats, first_layer, reason):
    plan = solo_plan(Task(graph="g", **settings), stats, "cpu")
    assert plan.first_layer == first_layer
    assert reason in plan.why[0]


def test_replay_is_for_gpus():
    task = Task(graph="g", name="a")
    assert solo_plan(task, DENSE, "cuda").replay
    assert not solo_plan(task, DENSE, "cpu").replay
    assert "a: solo on cuda" in str(solo_plan(task, DENSE, "cuda"))


def test_threads_are_for_work_that_can_be_shared():
    small, large = (
        solo_plan(Task(graph="g", hidden=16), SPARSE, "cpu"),
        solo_plan(Task(graph="g", hidden=4096), DENSE, "cpu"),
    )
    assert small.threads == 1
    assert "one thread" in small.why[-1]
    assert large.threads is None
    assert solo_plan(Task(graph="g"), SPARSE, "cuda").threads is None


def test_json_round_trip():
    plan = solo_plan(Task(graph="g"), SPARSE, "cpu")
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
