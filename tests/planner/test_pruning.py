"""Pruning: which members are stopped early."""

from __future__ import annotations

import pytest

from weft.core.errors import SpecError
from weft.planner.pruning import MedianPruner, every, policy_for

SCORES = {"a": [0.1, 0.2], "b": [0.5, 0.4], "c": [0.6, 0.6], "d": [0.3, 0.7], "e": []}


def test_below_the_median_of_the_others():
    pruner = MedianPruner(warmup=2, every=2)
    assert pruner(2, SCORES, ["a", "b", "c", "d"]) == ["a", "b"]
    assert pruner(2, SCORES, ["b", "d"]) == ["b"], "only those that still run"
    assert pruner(1, SCORES, ["a"]) == [], "not before the warm-up"
    assert MedianPruner(warmup=1)(50, {"a": [0.1], "b": [0.5]}, ["a"]) == [], "not among few"


def test_others_must_be_enough():
    pruner, three = MedianPruner(warmup=1, least=3), {"a": [0.1], "b": [0.5], "c": [0.6]}
    assert pruner(1, three, ["a"]) == [], "two others are fewer than three"
    assert pruner(1, three | {"d": [0.7]}, ["a"]) == ["a"]


def test_equal_members_all_stay():
    assert MedianPruner(warmup=1)(1, {name: [0.5] for name in "abcdef"}, list("abcdef")) == []


def test_the_pruned_keep_counting_so_that_survivors_survive():
    pruner, running = MedianPruner(warmup=1), list("abcdefgh")
    scores = {name: [0.1 * index] for index, name in enumerate(running)}
    for epoch in (10, 20, 30):
        running = [name for name in running if name not in pruner(epoch, scores, running)]
    assert running == ["e", "f", "g", "h"]


def test_policies():
    assert policy_for(None) is None
    assert isinstance(policy_for("median"), MedianPruner)
    assert every(policy_for(lambda epoch, scores, running: [])) == 10
    assert every(MedianPruner(every=3)) == 3
    with pytest.raises(SpecError, match="prune='hyperband' must be 'median' or a callable"):
        policy_for("hyperband")
    with pytest.raises(SpecError, match="warmup=0 must be a whole number of at least 1"):
        MedianPruner(warmup=0)
