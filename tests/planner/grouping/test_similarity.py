"""Similarity of steps: equal is 1, it is symmetric, and what can be matched decides."""

from __future__ import annotations

import pytest

from weft.core.graph_stats import GraphStats
from weft.core.models import MODELS
from weft.core.program import Operator, Program, Value
from weft.core.task import Task
from weft.planner.grouping.groups import group
from weft.planner.grouping.similarity import Features, features_of_program, features_of_task, kind_of, similarity

STATS = GraphStats("g", 1000, 5000, 32, num_classes=4)


def features(**settings) -> Features:
    found = features_of_task(Task(graph="g", **settings), STATS)
    assert found is not None
    return found


@pytest.mark.parametrize("model", MODELS)
def test_equals_are_one_and_order_does_not_count(model):
    score, words = similarity(features(model=model), features(model=model))
    assert score == pytest.approx(1.0)
    assert "operators can be matched" in words
    for other in MODELS:
        there, back = (similarity(*pair)[0] for pair in _both(features(model=model), features(model=other)))
        assert 0.0 <= there == back <= 1.0


def _both(one, other):
    return (one, other), (other, one)


def test_nearer_is_more_similar():
    two = features(layers=2)
    assert similarity(two, features(layers=3))[0] > similarity(two, features(layers=6))[0]
    assert similarity(two, features(model="sage"))[0] > similarity(two, features(model="gatv2"))[0]
    assert similarity(two, features(hidden=32))[0] > similarity(two, features(hidden=8))[0]
    assert similarity(two, features(norm="batch"))[0] < 1.0


def test_own_models_are_unknown_until_captured():
    assert features_of_task(Task(graph="g", model=lambda i, o: None), STATS) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("weft.spmm", "spmm"),
        ("weft.spmm_max", "spmm_max"),
        ("weft.attention_v2", "attention_v2"),
        ("aten.mm", "matmul"),
        ("aten.baddbmm", "matmul"),
        ("weft.linear", "matmul"),
        ("aten.native_layer_norm", "norm"),
        ("aten.relu", "pointwise"),
    ],
)
def test_kinds_by_name(name, kind):
    assert kind_of(name) == kind


def program(*names: str, width: int = 16) -> Program:
    values = tuple(Value(4 * width, "activation", (1000, width)) for _ in range(len(names) + 1))
    operators = tuple(Operator(name, "forward", (i,), (i + 1,), launches=1) for i, name in enumerate(names))
    return Program(values, operators, resident=(0,))


def test_programs_are_counted():
    found = features_of_program(program("aten.mm", "weft.spmm", "aten.relu", "weft.spmm"))
    assert found == Features({"matmul": 1, "spmm": 2, "pointwise": 1}, 16, 2)


def test_captured_programs_decide_for_own_models():
    def one(size_in, size_out):
        return None

    def other(size_in, size_out):
        return None

    tasks = [Task(graph="g", name="a", model=one), Task(graph="g", name="b", model=other)]
    alike = program("aten.mm", "weft.spmm", "aten.relu")
    (plan,) = group(tasks, STATS, "cuda", program_of=lambda task: alike, weave=True)
    assert plan.join == "woven"
    unlike = {"a": alike, "b": program(*["weft.attention"] * 9, width=999)}
    assert len(group(tasks, STATS, "cuda", program_of=lambda task: unlike[task.label], weave=True)) == 2
