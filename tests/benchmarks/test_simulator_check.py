"""The simulator against a queue that was run for real, and the recorded queue as a file of ``weft queue simulate``."""

from __future__ import annotations

import json
import math
import sys

import pytest

from benchmarks.queue_runs import simulator_check
from benchmarks.queue_runs.interference_fit import Fit, Pair, alone, calibrated, fit, together
from weft.cli.main import main
from weft.core.errors import SpecError
from weft.sched.interference import Interference
from weft.sched.queue_state import DeviceState, QueuedTask
from weft.sched.recorded_queue import RecordedQueue, read_recorded


def test_a_queue_is_measured_simulated_and_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(simulator_check, "POLICIES", ("lmcf", "backfill"))
    out = tmp_path / "check.json"
    words = ["check", "--tasks", "4", "--epochs", "4", "--rounds", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    simulator_check.main()
    found = json.loads(out.read_text())
    assert set(found["policies"]) == {"pipeswitch", "lmcf", "backfill"}
    assert all(math.isfinite(one["error"]) for one in found["policies"].values())
    assert found["fit"]["pairs"] == 2
    capsys.readouterr()
    again = ["weft", "queue", "simulate", "--file", str(tmp_path / "check-queue.json"), "--policy", "lmcf", "--json"]
    monkeypatch.setattr(sys, "argv", again)
    with pytest.raises(SystemExit):
        main()
    (run,) = json.loads(capsys.readouterr().out)["simulations"]
    assert run["metrics"]["makespan"] == pytest.approx(found["policies"]["lmcf"]["simulated"][0], rel=1e-9)


def test_share_and_contention_are_found_again():
    known = [
        alone(QueuedTask(name, 1, 1), seconds, busy)
        for name, seconds, busy in (("a", 10.0, 9.0), ("b", 8.0, 7.5), ("c", 4.0, 1.0), ("d", 4.0, 3.9))
    ]
    true = Fit(0.2, 0.0, 3, 0.55)
    pairs = []
    for two in ((known[0], known[1]), (known[2], known[3]), (known[0], known[3])):
        pairs.append(Pair(two, {run.id: run.end for run in together(calibrated(two, true), 0.2).tasks}))
    found = fit(pairs)
    assert found.error < 0.02
    longest = together(calibrated(known, true), 0.2).metrics().makespan
    assert together(calibrated(known, found), found.contention).metrics().makespan == pytest.approx(longest, rel=0.1)


def test_a_recorded_queue_is_read_as_it_was_written(tmp_path):
    tasks = (QueuedTask("a", 10, 1.0), QueuedTask("b", 20, 2.0, after=("a",)))
    queue = RecordedQueue(tasks, DeviceState("d", 100, workers=3), Interference(contention=0.4))
    (tmp_path / "q.json").write_text(queue.to_json())
    assert read_recorded(tmp_path / "q.json") == queue
    assert queue.on(50, None).device.budget_bytes == 50
    for text in ("[]", "{}", '{"tasks": [{"id": ""}], "device": {}}', "no"):
        (tmp_path / "q.json").write_text(text)
        with pytest.raises(SpecError, match=r"q\.json: "):
            read_recorded(tmp_path / "q.json")
