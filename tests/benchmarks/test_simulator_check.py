"""The simulator against a queue that was run for real, and the recorded queue as a file of ``weft queue simulate``."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.queue_runs import simulator_check
from benchmarks.queue_runs.check_trace import Trace, TraceRound, TraceRun
from benchmarks.queue_runs.interference_fit import Fit, Pair, alone, calibrated, fit, side_by_side, together
from benchmarks.queue_runs.outside_load import background
from weft.cli.main import main
from weft.core.errors import SpecError
from weft.sched.interference import Interference
from weft.sched.policies import find_policy
from weft.sched.queue_state import DeviceState, QueuedTask
from weft.sched.queues import RecordedQueue, read_recorded
from weft.sched.simulator import Conditions, simulate


def test_a_queue_is_measured_simulated_and_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(simulator_check, "POLICIES", ("lmcf", "backfill"))
    out = tmp_path / "check.json"
    words = ["check", "--tasks", "4", "--epochs", "4", "--rounds", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    simulator_check.main()
    found = json.loads(out.read_text())
    assert set(found["policies"]) == {"pipeswitch", "lmcf", "backfill"}
    for one in found["policies"].values():
        assert all(math.isfinite(error) for error in one["error"].values())
        assert abs(one["error"]["replayed"]) < 0.25  # of a run of a fifth of a second
    assert found["fit"]["pairs"] == 2
    table = capsys.readouterr().out.splitlines()[-5:]
    monkeypatch.setattr(sys, "argv", ["check", "--trace", str(tmp_path / "check-trace.json")])
    simulator_check.main()
    assert capsys.readouterr().out.splitlines()[-5:] == table
    again = ["weft", "queue", "simulate", "--file", str(tmp_path / "check-queue.json"), "--policy", "lmcf", "--json"]
    monkeypatch.setattr(sys, "argv", again)
    with pytest.raises(SystemExit):
        main()
    (run,) = json.loads(capsys.readouterr().out)["simulations"]
    actual = sum(task["seconds"] for task in found["queue"]["actual"])
    assert max(task["seconds"] for task in found["queue"]["actual"]) <= run["metrics"]["makespan"] < 20 * actual


@pytest.fixture(scope="module")
def recorded():
    """Three rounds of eight trainings on two cores, of which others wanted 1.1 to 2 times as much as there was."""
    trace = Trace.read(Path(__file__).with_name("recorded_trace.json"))
    return trace, simulator_check.check(trace)


def test_the_default_policy_starts_what_it_starts_in_a_simulation():
    # Recorded with the policy as it is; the other trace has it as it was before large tasks were begun early.
    trace = Trace.read(Path(__file__).with_name("recorded_trace_backfill.json"))
    found = simulator_check.check(trace)["policies"]
    assert len(found["backfill"]["measured"]) == 3
    assert all(abs(error) < 0.03 for one in found.values() for error in one["errors"]["replayed"])


@pytest.mark.parametrize("name", ["pipeswitch", "lmcf", "bmc", "base", "mps"])
def test_the_simulator_is_within_a_tenth_of_what_was_recorded(recorded, name):
    trace, found = recorded
    one = found["policies"][name]
    assert all(abs(error) < 0.03 for error in one["errors"]["replayed"])  # scheduling, in every round
    assert abs(one["error"]["simulated"]) < 0.1
    assert len(one["measured"]) == len(trace.rounds) == 3


def test_the_simulator_is_near_what_was_recorded_on_a_gpu():
    """Two rounds of ten trainings on an H200; in one pair a start took twice as long as alone, and no epoch did."""
    trace = Trace.read(Path(__file__).with_name("recorded_trace_gpu.json"))
    found = simulator_check.check(trace)
    assert all(abs(one["error"]["simulated"]) < 0.05 for one in found["policies"].values())
    assert all(abs(error) < 0.03 for one in found["policies"].values() for error in one["errors"]["replayed"])
    assert found["fit"]["error"] < 0.03
    alike = simulator_check.check(replace(trace, told=[trace.known(one) for one in trace.rounds]))
    assert "backfill" in alike["policies"]  # a server may have been told starts


def test_a_slow_start_of_a_pair_is_not_taken_for_interference():
    known = [alone(QueuedTask(name, 1, 1), 3.0, 2.0) for name in "ab"]
    both = known[0], known[1]
    usual = side_by_side(both, {"a": 3.5, "b": 3.5}, {"a": 2.5, "b": 2.5})
    late = side_by_side(both, {"a": 3.0, "b": 8.0}, {"a": 2.0, "b": 2.0})  # b started when a had ended
    found = fit([usual, late])
    assert found.error < 0.02
    assert fit([late]).error < 0.02
    longest = together(calibrated(known, found), found.contention).metrics().makespan
    assert longest == pytest.approx(3.5, rel=0.02)
    untrained = side_by_side(both, {"a": 3.0, "b": 3.0}, {"a": 0.0, "b": 0.0})
    assert (fit([untrained]).pairs, fit([untrained]).contention) == (0, Interference().contention)


def run_as(simulated, known, background=0.9):
    """A simulated run as if it had been measured on a GPU, beside others that keep the host busy."""
    tasks = {
        one.id: {"start": one.start, "end": one.end, "seconds": one.end - one.start,
                 "trained_seconds": one.end - one.start - known[one.id].start_seconds,
                 "cpu_seconds": 0.01, "waited_seconds": 0.0}
        for one in simulated.tasks
    }  # fmt: skip
    return TraceRun(simulated.makespan, background, tasks)


def test_on_a_gpu_tasks_keep_it_busy_in_their_epochs():
    lengths = {"a": (6.0, 5.0), "b": (5.0, 4.5), "c": (3.0, 1.0), "d": (2.0, 1.5), "e": (4.0, 3.5)}
    known = {name: alone(QueuedTask(name, 1 << 20, 1.0), *two) for name, two in lengths.items()}
    about, gpu = Conditions(Interference(contention=0.2, paging=1.0)), DeviceState("cuda:0", 1 << 30, workers=2)
    true = calibrated(list(known.values()), Fit(0.2, 0.0, 2, 0.7))

    def measured(policy, tasks):
        return run_as(simulate(find_policy(policy), tasks, [gpu], about), known)

    one = measured("pipeswitch", true)
    pairs = [measured("mps", pair) for pair in (true[:2], true[2:4])]
    policies = {"pipeswitch": one} | {name: measured(name, true) for name in ("base", "mps", "lmcf")}
    made = TraceRound(one, one, pairs, policies)
    trace = Trace(list(known.values()), gpu, 16, [made], [list(known.values())])
    found = simulator_check.check(trace)
    assert all(abs(one["error"]["simulated"]) < 0.05 for one in found["policies"].values())
    assert simulator_check.goal(found)[-1] == "pass"
    assert found["queue"]["background"] == 0.0  # what others want of the host is no part of the GPU
    assert found["fit"]["error"] < 0.01
    busy = {task["id"]: task["utilisation"] for task in found["queue"]["actual"]}
    assert busy["b"] > 2 * busy["c"] > 0.1


def test_without_the_others_the_recorded_queue_would_be_off(recorded):
    trace, _ = recorded
    quiet = [
        replace(one, policies={name: replace(run, background=0.0) for name, run in one.policies.items()})
        for one in trace.rounds
    ]
    found = simulator_check.check(replace(trace, rounds=quiet))
    assert all(one["error"]["simulated"] < -0.25 for one in found["policies"].values())


def test_what_others_want_of_the_processor():
    took = [{"cpu_seconds": 2.0, "waited_seconds": 2.0}, {"cpu_seconds": 1.0, "waited_seconds": 1.0}]
    cores = os.cpu_count()
    # Busy for 5 s on all cores, of which the groups had 3; these waited as long as they computed.
    assert background(100.0, 105.0, 4.0, took) == pytest.approx(2.0 / (4.0 * cores) * 2)
    assert background(100.0, 102.0, 4.0, took) == 0.0
    assert background(None, 5.0, 4.0, took) == 0.0
    assert background(100.0, 105.0, 5.0, []) == pytest.approx(1.0 / cores)


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
    about = DeviceState("d", 100, workers=3), Interference(contention=0.4)
    queue = RecordedQueue(tasks, *about, actual=(QueuedTask("b", 20, 3.5),), background=0.25)
    (tmp_path / "q.json").write_text(queue.to_json())
    assert read_recorded(tmp_path / "q.json") == queue
    assert queue.on(50, None).device.budget_bytes == 50
    for text in ("[]", "{}", '{"tasks": [{"id": ""}], "device": {}}', "no"):
        (tmp_path / "q.json").write_text(text)
        with pytest.raises(SpecError, match=r"q\.json: "):
            read_recorded(tmp_path / "q.json")
