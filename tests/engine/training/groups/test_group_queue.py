"""The groups of a run as a queue of one worker: in order, one at a time, through the scheduler's own decision."""

from __future__ import annotations

import weft
from weft.core.plan import Plan
from weft.engine.job import CONSIDERED, TRIED, GroupQueue

TASKS = {name: weft.Task(graph="demo", model="gcn", epochs=10, name=name) for name in "abc"}


def group(key: str, member: str, total_bytes: int, seconds: float = 0.1):
    return key, Plan((member,), cost={"total_bytes": total_bytes, "epoch_seconds": seconds})


def queue(room: int = 1 << 41) -> GroupQueue:
    return GroupQueue("cpu", lambda: room, TASKS)


def test_groups_run_in_order_whatever_they_take():
    waiting = [group("1", "a", 1 << 40, 9.0), group("2", "b", 10), group("3", "c", 0)]
    order = []
    while waiting:
        chosen, why = queue().next(waiting)
        assert queue().decide(waiting).started == (chosen[0],)
        assert "has the device to itself" in why
        waiting.remove(chosen)
        order.append(chosen[0])
    assert order == ["1", "2", "3"]


def test_a_group_that_is_not_admitted_is_tried_in_its_place_and_says_so():
    waiting = [group("1", "a", 1000), group("2", "b", 10)]
    decision = queue(room=100).decide(waiting)
    assert list(decision.refuse) == ["1"]
    assert decision.started == ("2",)
    (key, _), why = queue(room=100).next(waiting)
    assert key == "1"
    assert why.endswith(TRIED)
    assert "more than the 100 B that cpu has" in why


def test_thousands_of_groups_cost_no_more_than_some():
    waiting = [group(str(place), "a", place) for place in range(100 * CONSIDERED)]
    assert queue().next(waiting)[0][0] == "0"


def test_a_group_without_an_estimate_runs_as_well():
    chosen, _ = queue().next([("1a", Plan(("a",)))])
    assert chosen[0] == "1a"


def test_the_reason_is_in_the_journal():
    events = []
    sweep = weft.Sweep("demo", model=["gcn", "sage"], hidden=8, epochs=2)
    weft.run(sweep, device="cpu", progress=False, on_event=events.append)
    told = [event.data["scheduled"] for event in events if event.kind == "group"]
    assert told
    assert all("is next" in why for why in told)
    weft.run(weft.Task("demo", hidden=8, epochs=2), device="cpu", progress=False, on_event=events.append)
    assert any("is next" in event.data.get("scheduled", "") for event in events if event.kind == "start")
