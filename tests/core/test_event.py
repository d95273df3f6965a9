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
