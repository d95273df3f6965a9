"""Similarity of steps: equal is 1, it is symmetric, and what can be matched decides."""

from __future__ import annotations

import pytest

from weft.core.graph_stats import GraphStats
from weft.core.models import MODELS
from weft.core.task import Task
from weft.planner.grouping.groups import Features, features_of_task, similarity

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
