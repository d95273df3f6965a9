"""The queues of the paper and random ones: same seed, same queue, and the trainings that the benchmarks run."""

from __future__ import annotations

import pytest

from benchmarks.baselines.trainings import queue as benchmark_queue
from weft.core.errors import SpecError
from weft.graph.catalog.shapes import find
from weft.planner.machine_profiles import profile
from weft.sched.queues import PAPER_QUEUES, TABLE_IV, paper_queue, random_queue
from weft.sched.task_queue import TaskQueue

H200 = profile("h200")


@pytest.mark.parametrize("name", PAPER_QUEUES)
def test_a_queue_has_the_trainings_of_the_benchmark(name):
    tasks, entries = paper_queue(name, H200), benchmark_queue(name)
    assert [task.join_key for task in tasks] == [f"{e.shape}/{e.model}/{e.layers}" for e in entries]
    assert len(tasks) == 20
    assert {task.graph for task in tasks} == set(TABLE_IV)
    assert all(task.arrival == 0.0 and task.bytes > 0 and task.seconds > 0 for task in tasks)
    assert all(0 < task.utilisation <= 1 and 0 < task.shared_bytes < task.bytes for task in tasks)


def test_the_table_is_that_of_the_named_shapes():
    for name, (nodes, edges, features, classes) in TABLE_IV.items():
        shape = find(name)
        assert (shape.num_nodes, shape.num_features, shape.num_classes) == (nodes, features, classes)
        assert abs(shape.num_edges - edges) <= 1  # both directions are stored, so the shapes' counts are even


def test_random_queues_repeat_by_seed():
    first = random_queue(200, 7, H200, gap_seconds=1.0)
    assert first == random_queue(200, 7, H200, gap_seconds=1.0)
    assert first != random_queue(200, 8, H200, gap_seconds=1.0)
    assert len(first) == 200


def test_random_queues_have_all_kinds_of_tasks():
    tasks = random_queue(1000, 0, H200)
    TaskQueue.of(tasks)  # distinct ids, no circles
    assert any(task.deadline for task in tasks)
    assert any(task.after for task in tasks)
    assert any(task.kind == "inference" for task in tasks)
    assert {task.priority for task in tasks} == {0, 1}
    assert len({task.join_key for task in tasks}) < 500


def test_errors():
    with pytest.raises(SpecError, match="no queue 'mixed'"):
        paper_queue("mixed", H200)
    with pytest.raises(SpecError, match="tasks=0 must be at least 1"):
        random_queue(0, 0, H200)
