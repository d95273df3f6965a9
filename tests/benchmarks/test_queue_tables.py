"""The last lines of the queue's benchmarks: which goals were reached, and which have no figure."""

from __future__ import annotations

import ctypes
import json
import sys

import pytest

from benchmarks.queue_runs import tables
from benchmarks.queue_runs.server import NVML
from benchmarks.queue_runs.tables import GIB, goals


def cell(queue, mode, makespan, jct, wait, **more):
    about = {"queue": queue, "mode": mode, "status": "ok", "done": 20, "failed": {}, "out_of_memory": 0}
    sizes = {"peak_bytes": 20 * GIB, "budget_bytes": 26 * GIB, "reserved_bytes": 6 * GIB, "planning_seconds": 1.0}
    times = {"makespan": makespan, "mean_jct": jct, "mean_queuing": wait, "p95_jct": jct, "p95_queuing": wait}
    return {**about, **sizes, **times, **more}


def queue_cells(name, slower=6.0):
    return [
        cell(name, "pyg", 10.0 * slower, 6.0 * slower, 5.0 * slower),
        cell(name, "pipeswitch", 30.0, 16.0, 15.0, simulator_error=0.5),
        cell(name, "lmcf", 12.0, 4.0, 3.0, simulator_error=-0.05, device_peak_bytes=30 * GIB),
        cell(name, "bmc", 11.0, 6.0, 5.0, simulator_error=0.08),
        cell(name, "backfill", 10.0, 3.0, 1.5, simulator_error=0.02),
    ]


def verdicts(cells, queues):
    return {row[0]: row[-1] for row in goals(cells, queues)}


def test_goals_that_are_reached():
    cells = [*queue_cells("gcn"), *queue_cells("gat", 7.0)]
    found = goals(cells, ["gcn", "gat"])
    assert {row[-1] for row in found} == {"pass", "-"}
    assert found[0][2:4] == [pytest.approx(6.0), "gcn"]
    assert found[-1][2] == pytest.approx(60.0 / 11.0)  # planning counted


@pytest.mark.parametrize(
    ("changed", "goal"),
    [
        ({"mode": "pyg", "makespan": 49.0}, "makespan: PyG one by one / Weft"),
        ({"mode": "lmcf", "mean_jct": 2.9}, "mean JCT: LMCF / Weft"),
        ({"mode": "bmc", "makespan": 10.0}, "makespan: BMC / Weft"),
        ({"mode": "bmc", "simulator_error": -0.11}, "simulated makespan off by, worst policy"),
        ({"mode": "lmcf", "out_of_memory": 1}, "out of memory"),
        ({"mode": "bmc", "failed": {"a": "refused"}}, "tasks that failed"),
        ({"mode": "backfill", "peak_bytes": 27 * GIB}, "admitted / budget for tasks"),
        ({"mode": "lmcf", "device_peak_bytes": 33 * GIB}, "device's peak / whole budget"),
    ],
)
def test_a_goal_that_is_missed_on_one_queue(changed, goal):
    cells = [*queue_cells("gcn"), *queue_cells("gat")]
    (place,) = [i for i, one in enumerate(cells) if one["queue"] == "gat" and one["mode"] == changed["mode"]]
    cells[place] = {**cells[place], **changed}
    found = verdicts(cells, ["gcn", "gat"])
    assert found[goal] == "MISS"
    assert sum(verdict == "MISS" for verdict in found.values()) == 1


def test_what_was_not_measured_is_said():
    cells = queue_cells("gcn")
    assert verdicts(cells, ["gcn", "gat"])["mean JCT: LMCF / Weft"] == "no figure of gat"
    assert verdicts([], ["gcn"])["out of memory"] == "no figure"
    fewer = [{**one, "done": 19} if one["mode"] == "pyg" else one for one in cells]  # not the same work
    assert verdicts(fewer, ["gcn"])["makespan: PyG one by one / Weft"] == "no figure"


def test_the_tables_of_a_file(tmp_path, monkeypatch, capsys):
    path = tmp_path / "queues.json"
    skipped = {"queue": "gcn", "mode": "mps", "status": "skipped", "reason": "no time"}
    cells = [{**one, "run": 0} for one in (*queue_cells("gcn"), skipped)]
    path.write_text(json.dumps({"benchmark": "queues", "runs": [{}], "cells": cells}))
    monkeypatch.setattr(sys, "argv", ["tables", str(path)])
    tables.main()
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("| gcn | 60.0 / 36.0 / 30.0 |") for line in lines)
    assert lines[-1].startswith("| makespan with planning")


class FakeNVML:
    """A driver's library: every function answers 0 and writes what is asked for."""

    def __init__(self, code=0):
        self.code = code

    def __getattr__(self, name):
        def answer(*arguments):
            out = arguments[-1]._obj if arguments and hasattr(arguments[-1], "_obj") else None
            if isinstance(out, ctypes.Structure):
                for field, value in (("gpu", 37), ("used", 5 << 30)):
                    if field in dict(out._fields_):
                        setattr(out, field, value)
            return self.code

        return answer


def test_a_gpu_is_read_from_the_drivers_library():
    gpu = NVML(0, FakeNVML())
    assert (gpu.busy(), gpu.used_bytes()) == (0.37, 5 << 30)
    with pytest.raises(OSError, match="answered 9"):
        NVML(0, FakeNVML(9))
