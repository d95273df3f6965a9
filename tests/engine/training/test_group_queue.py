"""The groups of a run as a queue of one worker: in order, one at a time, through the scheduler's own decision."""

from __future__ import annotations

import weft
from weft.core.plan import Plan
from weft.engine.training.group_queue import CONSIDERED, next_group

TASKS = {name: weft.Task(graph="demo", model="gcn", epochs=10, name=name) for name in "abc"}


def group(key: str, member: str, total_bytes: int, seconds: float = 0.1):
    return key, Plan((member,), cost={"total_bytes": total_bytes, "epoch_seconds": seconds})


def test_groups_run_in_order_whatever_they_take():
    waiting = [group("1", "a", 1 << 40, 9.0), group("2", "b", 10), group("3", "c", 0)]
    order = []
    while waiting:
        chosen, decision = next_group(waiting, TASKS)
        assert decision.started == (chosen[0],)
        waiting.remove(chosen)
        order.append(chosen[0])
    assert order == ["1", "2", "3"]


def test_thousands_of_groups_cost_no_more_than_some():
    waiting = [group(str(place), "a", place) for place in range(100 * CONSIDERED)]
    assert next_group(waiting, TASKS)[0][0] == "0"


def test_a_group_without_an_estimate_runs_as_well():
    chosen, _ = next_group([("1a", Plan(("a",)))], TASKS)
    assert chosen[0] == "1a"
