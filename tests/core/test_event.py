"""Events are one line of valid JSON each."""

from __future__ import annotations

import json
import math

from weft.core.event import Event


def test_one_line_of_json_without_nan():
    event = Event("progress", "gcn", {"loss": math.nan, "deep": {"list": [1.0, math.inf]}}, time=1.23456)
    line = event.to_json()
    assert "\n" not in line
    assert json.loads(line) == {
        "event": "progress",
        "task": "gcn",
        "time": 1.235,
        "loss": None,
        "deep": {"list": [1.0, None]},
    }


def test_the_stamp_is_in_the_line_and_comes_back():
    event = Event("progress", "t", {"epoch": 3, "group": 1}, 12.5, run="r", seq=7, worker="host-1", group="1a")
    line = json.loads(event.to_json())
    assert {key: line[key] for key in ("run", "seq", "worker", "group_key", "group")} == {
        "run": "r",
        "seq": 7,
        "worker": "host-1",
        "group_key": "1a",
        "group": 1,
    }
    assert Event.from_dict(line) == event


def test_lines_without_a_stamp_are_read():
    line = {"event": "note", "task": "t", "time": 1.0, "message": "m"}
    assert Event.from_dict(line) == Event("note", "t", {"message": "m"}, 1.0)
    assert Event.from_dict(line).to_dict() == line
