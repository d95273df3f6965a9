"""The groups of a run are admitted as a server admits tasks; one that is refused is tried at its turn."""

from __future__ import annotations

import weft
from weft.core.plan import Plan
from weft.engine.job import TRIED, admission


def test_a_group_that_fits_has_the_device_to_itself():
    assert "has the device to itself" in admission("1", Plan(("a",), cost={"total_bytes": 1 << 40}), "cpu", 1 << 41)
    assert "has the device to itself" in admission("1a", Plan(("a",)), "cpu", 0), "a group without an estimate runs"


def test_a_group_that_is_not_admitted_is_tried_and_says_so():
    why = admission("1", Plan(("a",), cost={"total_bytes": 1000}), "cpu", 100)
    assert why.endswith(TRIED)
    assert "more than the 100 B that cpu has" in why


def test_groups_run_in_the_order_of_their_tasks():
    events = []
    sweep = weft.Sweep("demo", model=["gcn", "sage", "gat"], hidden=8, epochs=2)
    weft.run(sweep, device="cpu", progress=False, on_event=events.append, options=weft.RunOptions(weave="off"))
    assert [event.task for event in events if event.kind == "end"] == [task.label for task in sweep]


def test_the_reason_is_in_the_journal():
    events = []
    sweep = weft.Sweep("demo", model=["gcn", "sage"], hidden=8, epochs=2)
    weft.run(sweep, device="cpu", progress=False, on_event=events.append)
    told = [event.data["scheduled"] for event in events if event.kind == "group"]
    assert told
    assert all("is next" in why for why in told)
    weft.run(weft.Task("demo", hidden=8, epochs=2), device="cpu", progress=False, on_event=events.append)
    assert any("is next" in event.data.get("scheduled", "") for event in events if event.kind == "start")
