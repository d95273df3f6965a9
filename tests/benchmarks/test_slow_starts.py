"""Where the seconds of starts went, and which of them took much longer than in the other runs of a queue."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.queue_runs import slow_starts
from benchmarks.queue_runs.queue_simulations import add_simulations
from benchmarks.queue_runs.start_parts import PARTS, parts_of
from weft.serve.queue_file import QueueEvent

RECORDED = Path(__file__).parents[1] / "sched" / "recorded_run.json"  # from before parts were recorded


def events(*times):
    return [QueueEvent(place, "a", kind, time) for place, (kind, time) in enumerate(times)]


ONCE = (("running", 1.0), ("ready", 1.5), ("start", 3.5), ("progress", 4.0), ("progress", 9.0), ("done", 9.25))


def test_the_parts_of_a_start():
    found = parts_of(events(("queued", 0.0), ("planned", 0.5), *ONCE))
    assert found == dict(zip(PARTS, (0.5, 2.0, 0.5, 0.25), strict=True))


def test_the_last_attempt_counts():
    lost = (("running", 0.1), ("ready", 0.2), ("start", 0.3), ("progress", 0.4), ("queued", 0.5))
    assert parts_of(events(*lost, *ONCE)) == parts_of(events(*ONCE))
    begun_again = (("running", 1.0), ("done", 2.0))
    assert parts_of(events(*lost, *begun_again)) == {}, "nothing of the attempt that was lost"


def test_parts_without_events_are_left_out():
    without = events(*(one for one in ONCE if one[0] != "ready"))
    assert set(parts_of(without)) == {"first_seconds", "after_seconds"}
    assert parts_of([]) == {}


def run(mode, starts, **more):
    took = {name: {"seconds": start + 1.0, "trained_seconds": 1.0} for name, start in starts.items()}
    return {"queue": "gcn", "mode": mode, "status": "ok", "took": took, **more}


def cells():
    slow = run("pipeswitch", {"a": 1.0, "b": 0.45, "c": 1.0})
    slow["took"]["a"] |= dict(zip(PARTS, (0.1, 0.7, 0.125, 0.075), strict=True))
    again = run("bmc", {"a": 0.2, "b": 0.2, "c": 3.0}, tried_again={"c": "its worker ended"})
    other = [{"queue": "gcn", "mode": "pyg", "status": "ok"}, {"queue": "gcn", "mode": "mps", "status": "skipped"}]
    return [slow, run("lmcf", {"a": 0.3, "b": 0.2, "c": 0.6}), again, *other]


def test_starts_that_took_much_longer_than_elsewhere():
    first, second = slow_starts.slow_starts(cells())  # b took 0.25 s longer, c less than twice as long
    assert (first.mode, first.task, first.tried_again) == ("pipeswitch", "a", False)
    assert (first.seconds, first.elsewhere) == (pytest.approx(1.0), pytest.approx(0.25))
    assert first.parts["built_seconds"] == 0.7
    assert (second.mode, second.task, second.tried_again) == ("bmc", "c", True)
    assert second.elsewhere == pytest.approx(0.8)


def printed(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["slow_starts", str(path)])
    slow_starts.main()
    return capsys.readouterr().out.splitlines()


def test_the_table(tmp_path, monkeypatch, capsys):
    path = tmp_path / "queues.json"
    path.write_text(json.dumps({"cells": cells()}))
    header, _, first, second = ([word.strip() for word in line.split("|")[1:-1]]
                                for line in printed(path, monkeypatch, capsys))  # fmt: skip
    assert header[3:] == ["start s", "elsewhere s", "ready s", "built s", "first s", "after s"]
    assert first == ["gcn", "pipeswitch", "a", "1", "0.25", "0.1", "0.7", "0.125", "0.075"]
    assert second == ["gcn", "bmc", "c (tried again)", "3", "0.8", "-", "-", "-", "-"]


def test_a_file_without_parts_has_the_starts_alone(monkeypatch, capsys):
    header, _, *rows = printed(RECORDED, monkeypatch, capsys)
    assert "built" not in header
    assert len(rows) == 5


def test_parts_change_nothing_for_the_simulator():
    plain = json.loads(RECORDED.read_text())["cells"]
    more = json.loads(RECORDED.read_text())["cells"]
    for cell in more:
        for took in cell.get("took", {}).values():
            took |= dict.fromkeys(PARTS, 0.1)
    add_simulations(plain)
    add_simulations(more)
    assert [one.get("simulated_makespan") for one in more] == [one.get("simulated_makespan") for one in plain]
