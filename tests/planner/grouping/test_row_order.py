"""Rows by cluster or by length: where it pays, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.core.graph_stats import GraphStats
from weft.core.plan import Plan
from weft.core.task import Task
from weft.planner.grouping.groups import group, plan_as_one_group
from weft.planner.grouping.step_options import row_order
from weft.planner.machine_profiles import profile

ARXIV = GraphStats("arxiv", 169_343, 2_315_598, num_features=128, num_classes=40)
PRODUCTS = GraphStats("products", 2_449_029, 123_718_280, num_features=100, num_classes=47)
PUBMED = GraphStats("pubmed", 19_717, 88_648, num_features=500, num_classes=3)


def tasks(count: int = 1, **settings) -> list[Task]:
    return [Task(graph="g", seed=seed, name=str(seed), **settings) for seed in range(count)]


@pytest.mark.parametrize(
    ("count", "settings", "stats", "yes", "reason"),
    [
        (1, {}, PRODUCTS, True, "do not stay in the cache (627 MB in a cache of 52 MB)"),
        (1, {"epochs": 2000}, ARXIV, False, "stay in the cache in any order (43 MB"),
        (1, {"epochs": 2000, "hidden": 128}, ARXIV, True, "87 MB"),
        (1, {"epochs": 2000, "hidden": 128, "precision": "bf16"}, ARXIV, False, "43 MB"),
        (4, {"epochs": 2000}, ARXIV, True, "4 members"),
        (4, {"epochs": 100}, ARXIV, False, "100 epochs would save 0.015 s by clusters, less"),
        (3, {"epochs": 2000}, ARXIV, False, "43 MB"),
        (16, {}, PUBMED, False, "88,648 edges"),
        (1, {"epochs": 10}, PRODUCTS, False, "10 epochs would save"),
        (16, {"epochs": 10}, PRODUCTS, True, "do not stay"),
        (16, {}, replace(PRODUCTS, num_nodes=(1 << 24) + 1), False, "16,777,217 nodes"),
    ],
)
def test_where_it_pays(count, settings, stats, yes, reason):
    found, (why,) = row_order(tasks(count, **settings), stats, "cuda")
    assert found is yes
    assert reason in why
    assert why.startswith("rows by cluster: " if yes else "rows by length: ")


def test_a_cpu_is_not_asked():
    assert row_order(tasks(16), PRODUCTS, "cpu") == (False, ())


def test_the_cache_is_that_of_the_machine():
    machine = profile("h200").with_device(l2_bytes=40 << 20)
    long = tasks(1, epochs=2000)
    assert row_order(long, ARXIV, "cuda", machine)[0]
    assert not row_order(long, ARXIV, "cuda", machine.with_device(l2_bytes=0))[0]  # nobody measured it


def test_one_member_in_many_may_be_wide_or_long():
    mixed = [*tasks(1, epochs=5), Task(graph="g", name="wide", hidden=256, epochs=500)]
    assert row_order(mixed, ARXIV, "cuda")[0]


@pytest.mark.parametrize("plan_of", [lambda *given: group(*given)[0], plan_as_one_group], ids=["group", "one group"])
def test_plans_say_so(plan_of):
    plan = plan_of(tasks(16, epochs=1000), ARXIV, "cuda")
    assert plan.row_order == "clustered"
    assert any("16 members traverse the graph" in reason for reason in plan.why)
    assert Plan.from_dict(plan.to_dict()) == plan
    assert plan.halves()[0].row_order == "clustered"
    assert plan_of(tasks(16, epochs=1000), ARXIV, "cpu").row_order == "by_length"
    assert plan_of(tasks(16), PUBMED, "cuda").row_order == "by_length"


def test_earlier_plans_went_by_length():
    old = {key: value for key, value in Plan(("a",)).to_dict().items() if key != "rows"}
    assert Plan.from_dict(old).row_order == "by_length"
