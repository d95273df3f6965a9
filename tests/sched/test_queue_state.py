"""The scheduler's data: JSON and back, checks with clear messages, and the indexed queue."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings

from tests.sched.queues import GIB, device, queues, task
from weft.core.errors import SpecError
from weft.sched.admission import waits_for
from weft.sched.queue_state import DeviceState, MachineState, QueuedTask
from weft.sched.task_queue import TaskQueue


@pytest.mark.parametrize(
    "value",
    [task("a", after=("b",), deadline=4.0, user="ann"), device(reserved_bytes=GIB, inference_workers=1)],
    ids=lambda value: type(value).__name__,
)
def test_json_and_back(value):
    assert type(value).from_dict(json.loads(json.dumps(value.to_dict()))) == value


@settings(max_examples=50, deadline=None)
@given(tasks=queues())
def test_every_task_survives_json(tasks):
    for one in tasks:
        assert QueuedTask.from_dict(json.loads(json.dumps({**one.to_dict(), "of later": 1}))) == one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": ""}, "no id"),
        ({"kind": "play"}, "kind='play' must be one of training, inference"),
        ({"bytes": -1}, "shared_bytes=0 must be from 0 to bytes=-1"),
        ({"seconds": float("nan")}, "seconds=nan"),
        ({"utilisation": 1.5}, "utilisation=1.5 must be from 0 to 1"),
        ({"turn_seconds": -1.0}, "turn_seconds=-1.0 must be a number of at least 0"),
        ({"start_seconds": 99.0}, "start_seconds=99.0 must be from 0 to seconds="),
        ({"latency_target": 0.0}, "latency_target=0.0"),
        ({"after": ("a",)}, "names the task itself"),
    ],
)
def test_bad_tasks(change, message):
    with pytest.raises(SpecError, match=message):
        QueuedTask(**{"id": "a", "bytes": 1, "seconds": 1.0, **change})


def test_bad_devices():
    with pytest.raises(SpecError, match="workers=0 must be at least 1"):
        device(workers=0)
    with pytest.raises(SpecError, match="reserved_bytes=5"):
        DeviceState("d", 5, reserved_bytes=5)
    with pytest.raises(SpecError, match="each with a name of its own"):
        MachineState((device(), device()))


def test_a_queue_releases_what_was_waiting():
    queue = TaskQueue.of([task("a"), task("b", after=("a",)), task("c", after=("b", "a"))])
    assert list(queue.by_arrival) == ["a"]
    assert queue.blocked_by("c") == ("b", "a")
    queue.take("a")
    assert list(queue.by_arrival) == []
    queue.finish("a")
    assert list(queue.by_arrival) == ["b"]
    assert queue.blocked_by("c") == ("b",)


def test_a_task_that_is_put_back_has_its_old_place():
    queue = TaskQueue.of([task("a"), task("b")])
    taken = queue.take("a")
    queue.put_back(taken)
    assert list(queue.by_arrival) == ["a", "b"]
    with pytest.raises(SpecError, match="not running"):
        queue.put_back(taken)


def test_the_same_id_twice_is_an_error():
    with pytest.raises(SpecError, match="queued or running already"):
        TaskQueue.of([task("a"), task("a")])


@settings(max_examples=50, deadline=None)
@given(tasks=queues())
def test_every_index_empties_with_the_queue(tasks):
    queue = TaskQueue.of(tasks)
    while len(queue):
        name = queue.by_arrival[0]
        queue.take(name)
        queue.finish(name)
    assert not queue.lanes
    assert not queue.by_join
    assert not queue.by_bytes
    assert not queue.all_by_bytes
    assert queue.ready_work == pytest.approx(0.0, abs=1e-6)


def test_a_task_waits_for_a_few_names_and_a_number():
    assert waits_for(["a", "b", "c"]) == "waits for 'a', 'b', 'c' to be done"
    assert waits_for(["a", "b", "c", "d", "e"]) == "waits for 'a', 'b', 'c' and 2 more to be done"
