"""The rough measure of a task: it grows with what it should grow with, and machines change its price."""

from __future__ import annotations

import pytest

from weft.core.graph_stats import GraphStats
from weft.core.models import MODELS
from weft.core.task import Task
from weft.planner.cost.rule import DEFAULT_RATES, rates_of, rule_memory, work
from weft.planner.machine_profiles import profile

RELATIONS = {"num_relations": 3, "relation_rows": 25_000}
STATS = GraphStats("g", 10_000, 60_000, 128, num_classes=10, **RELATIONS)


@pytest.mark.parametrize("model", MODELS)
def test_more_of_anything_is_more_work(model):
    base = work(Task(graph="g", model=model), STATS)
    assert work(Task(graph="g", model=model, hidden=128), STATS).bytes > base.bytes
    deeper = work(Task(graph="g", model=model, layers=4), STATS)
    assert deeper.flops > base.flops
    assert deeper.launches > base.launches
    larger = GraphStats("g", 10_000, 600_000, 128, num_classes=10, **RELATIONS)
    assert work(Task(graph="g", model=model), larger).bytes > base.bytes


def test_padding_is_the_work_of_the_wider_task():
    narrow, wide = Task(graph="g", hidden=16), Task(graph="g", hidden=64)
    assert work(narrow, STATS, 64) == work(wide, STATS)


def test_sparse_features_are_less_work():
    sparse = GraphStats("g", 10_000, 60_000, 128, feature_nnz=1000, num_classes=10)
    assert work(Task(graph="g"), sparse).flops < work(Task(graph="g"), STATS).flops


def test_memory_counts_the_graph_once():
    tasks = [Task(graph="g", name=f"t{i}") for i in range(3)]
    one, two, three = (rule_memory(tasks[: i + 1], STATS) for i in range(3))
    assert one < two < three < 3 * one
    assert three - two == pytest.approx(two - one)
    assert rule_memory(tasks, STATS, "cuda") > three


@pytest.mark.parametrize("change", [{"model": "gat"}, {"norm": "batch"}, {"hidden": 128}, {"layers": 5}])
def test_what_keeps_more_takes_more(change):
    assert rule_memory([Task(graph="g", **change)], STATS) > rule_memory([Task(graph="g")], STATS)


def test_rates_come_from_the_machine_where_there_is_one():
    assert rates_of("cuda", None, "fp32") == DEFAULT_RATES["cuda"]
    h200, a100 = (rates_of("cuda", profile(name), "fp32") for name in ("h200", "a100-40g"))
    assert h200.bandwidth > a100.bandwidth
    assert rates_of("cuda", profile("h200"), "bf16").flops > h200.flops
    assert rates_of("cpu", profile("cpu"), "fp32").launch > h200.launch
