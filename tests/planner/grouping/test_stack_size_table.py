"""The search for the best group size finds peaks with few measurements; its table survives JSON."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.graph_stats import GraphStats
from weft.core.task import Task
from weft.planner.grouping.limits import MIN_GAIN, Throughput, best_size, find_group_size, key_of, shape_class

STATS = GraphStats("g", 169_343, 2_332_486, 128)


def curve(launches: float, work: float, peak: float, slope: float):
    """Launches shared by T tasks, work of each, and contention beyond ``peak``."""
    return lambda tasks: launches / tasks + work + slope * max(tasks - peak, 0.0)


@given(
    launches=st.floats(0, 100),
    work=st.floats(0.1, 10),
    peak=st.integers(1, 80),
    slope=st.floats(0.05, 5),
    limit=st.integers(1, 64),
)
def test_the_search_comes_near_the_best_in_few_steps(launches, work, peak, slope, limit):
    measure = curve(launches, work, peak, slope)
    size, measured = find_group_size(measure, limit)
    assert 1 <= size <= limit
    assert len(measured) <= 13  # 7 doublings, 3 sections of 2
    fastest = min(measure(tasks) for tasks in range(1, limit + 1))
    assert measured[size] <= fastest * 1.35


def test_a_clear_peak_is_found():
    size, measured = find_group_size(curve(100.0, 1.0, 20, 2.0), 64)
    assert 18 <= size <= 22
    assert measured[size] == min(measured.values())


def test_where_more_gains_nothing_the_smaller_group_is_taken():
    size, _ = find_group_size(lambda tasks: 1.0, 64)
    assert size == 1
    assert best_size({8: 1.0 + MIN_GAIN / 2, 16: 1.0}) == 8


def test_groups_that_do_not_run_are_passed_over():
    size, measured = find_group_size(lambda tasks: 10.0 / tasks if tasks <= 12 else math.inf, 64)
    assert size <= 12
    assert math.isinf(max(measured.values()))
    assert Throughput("m").with_measured(Task(graph="g"), STATS, measured).group_size(Task(graph="g"), STATS) == size


def test_the_table_survives_json():
    task = Task(graph="g", hidden=64)
    table = Throughput("here").with_measured(task, STATS, {1: 2.0, 16: 1.0, 64: math.inf}, busy={16: 0.9})
    again = Throughput.from_dict(json.loads(json.dumps(table.to_dict(), allow_nan=False)))
    assert again.group_size(task, STATS) == 16
    assert again.ms(task, STATS, 1) == 2.0
    assert again.ms(task, STATS, 64) is None
    assert again.busy_share(task, STATS, 16) == 0.9
    newer = again.with_measured(task, STATS, {1: 0.5})
    assert newer.ms(task, STATS, 1) == 0.5
    assert newer.group_size(task, STATS) == 1


@pytest.mark.parametrize("change", [{"model": "gin"}, {"hidden": 16}, {"precision": "bf16"}])
def test_other_tasks_were_not_measured(change):
    table = Throughput("here").with_measured(Task(graph="g"), STATS, {1: 2.0})
    assert table.group_size(Task(graph="g", **change), STATS) is None
    assert key_of(Task(graph="g", lr=0.5, seed=9), STATS) == key_of(Task(graph="g"), STATS)


def test_classes_of_graphs_are_powers_of_two():
    assert shape_class(STATS) == "n17e21"
    assert shape_class(GraphStats("g", 1, 0)) == "n0e0"
