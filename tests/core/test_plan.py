"""A plan is plain data for a group of tasks."""

from __future__ import annotations

import json

import pytest

from weft.core.errors import SpecError
from weft.core.graph_stats import GraphStats
from weft.core.plan import Plan, Stage
from weft.core.task import Task


def test_json_round_trip():
    plan = Plan(("a", "b", "c"), "woven", "cuda", True, why=("because",), stacks=((0, 2), (1,)), cost={"seconds": 0.5})
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert Plan.from_dict({**plan.to_dict(), "of a later version": 1}) == plan


def test_what_makes_it_executable_goes_through_json():
    tasks = (Task(graph="cora", name="a", betas=(0.8, 0.9)), Task(graph="cora", name="b", lr=0.5))
    stages = (Stage("sample", "cpu", depth=4, workers=2), Stage("train", "gpu:0"))
    graph = GraphStats("cora", 10, 20, 5, num_classes=3).fingerprint()
    plan = Plan(
        ("a", "b"), "stacked", "cuda", stages=stages, shards=2, budget=7, graph=graph, weights=("1f",), tasks=tasks
    )
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    first, second = plan.halves()
    assert (first.tasks, second.tasks, first.weights) == (tasks[:1], tasks[1:], ())


def test_the_full_graph_is_one_stage_on_the_device():
    assert Plan(("a",)).stages == (Stage("train", "cpu", 1, 1),)
    assert Plan(("a",), device="cuda").stages == (Stage("train", "gpu", 1, 1),)
    old = {key: value for key, value in Plan(("a",), device="cuda").to_dict().items() if key != "stages"}
    assert Plan.from_dict(old).stages == (Stage("train", "gpu", 1, 1),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resource": "abacus"}, "resource='abacus' must be one of gpu, cpu, pcie, link, disk"),
        ({"depth": 0}, "depth=0 must be a whole number, at least 1"),
        ({"workers": 1.5}, "workers=1.5 must be a whole number, at least 1"),
    ],
)
def test_bad_stages_are_named(change, message):
    with pytest.raises(SpecError, match=f"stage 'train': {message}"):
        Stage(**{"name": "train", "resource": "gpu", **change})


def test_a_fingerprint_tells_graphs_apart():
    stats = GraphStats("cora", 2_708, 10_556, 1_433, num_classes=7, degree_histogram=(0, 5, 3))
    before = stats.fingerprint()
    assert before.obstacle(GraphStats.from_dict({**stats.to_dict(), "name": "renamed"}).fingerprint()) is None
    larger = GraphStats.from_dict({**stats.to_dict(), "num_nodes": 3_000}).fingerprint()
    assert before.obstacle(larger) == (
        "graph 'cora' had 2,708 nodes, 10,556 edges, 1,433 features and 7 classes when this was planned, "
        "and has 3,000 nodes, 10,556 edges, 1,433 features and 7 classes now; plan again"
    )
    skewed = GraphStats.from_dict({**stats.to_dict(), "degree_histogram": [1, 4, 3]}).fingerprint()
    assert "other degrees, features or splits" in before.obstacle(skewed)


def test_without_stacks_all_members_are_one():
    assert Plan(("a", "b"), "stacked").stack_members == ((0, 1),)
    assert Plan(("a", "b"), "woven", stacks=((1,), (0,))).stack_members == ((1,), (0,))


def test_in_words():
    assert str(Plan(("a",), why=("small",))) == "a: solo on cpu\n  - small"
    woven = Plan(tuple("abcdef"), "woven", stacks=((0, 1, 2), (3, 4, 5)))
    assert str(woven) == "6 tasks (a, b, c, d, ...): woven in 2 stacks on cpu"


def test_halves():
    first, second = Plan(tuple("abcde"), "stacked").halves()
    assert (first.members, first.join, second.members) == (("a", "b"), "stacked", ("c", "d", "e"))
    first, second = Plan(tuple("abc"), "woven", stacks=((0, 2), (1,))).halves()
    assert (first.members, first.join, first.stacks) == (("a", "c"), "stacked", ())
    assert (second.members, second.join) == (("b",), "solo")
    first, second = Plan(tuple("abcd"), "woven", stacks=((3,), (0,), (1, 2))).halves()
    assert second.members == ("a", "b", "c")
    assert second.stacks == ((0,), (1, 2))
