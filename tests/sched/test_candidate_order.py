"""In which order the default policy considers tasks."""

from __future__ import annotations

from tests.sched.queues import device, task
from weft.sched.backfill import CandidateOrder
from weft.sched.queue_state import MachineState
from weft.sched.task_queue import TaskQueue


def order(tasks, now=0.0, age_seconds=100.0):
    return CandidateOrder(TaskQueue.of(tasks), MachineState((device(),), now, ()), age_seconds)


def test_waiting_counts_in_whole_levels():
    """Within a level the shorter task goes first, although the other has waited longer."""
    long = task("long", 1, 1000.0, arrival=10.0, user="ann")
    short = task("short", 1, 1.0, arrival=90.0, user="bob")
    assert [one.id for one in order([long, short], now=200.0)] == ["short", "long"]
    assert [one.id for one in order([long, short], now=215.0)] == ["long", "short"], "now it is a level ahead"


def test_users_take_turns_while_tasks_are_taken():
    tasks = [
        task(f"{user}{number}", 1, 10.0, user=user, utilisation=0.5) for user in ("ann", "bob") for number in (1, 2)
    ]
    found, seen = order(tasks), []
    for one in found:
        found.take(one)
        seen.append(one.user)
    assert seen == ["ann", "bob", "ann", "bob"]
