"""Estimates against runs: every kind of training is estimated and run, and the figures of the report are right."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from benchmarks.baselines.trainings import entries
from benchmarks.suites import estimates
from weft.graph.generate import citation
from weft.planner.machine_profiles import profile

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def graph():
    return citation(60, 240, 6, 3, seed=1)


@pytest.mark.parametrize(("place", "tasks"), [(0, 1), (0, 3), (25, 1), (45, 3), (65, 1)])
def test_queues_are_estimated_and_run(place, tasks, graph):
    entry = replace(entries(["queues"])[place], layers=2)
    found = estimates.cell(entry, tasks, graph, profile("cpu"), 8)
    assert found["estimated_allocated"] > 60 * 6 * 4
    assert found["seconds"] > 0
    assert found["estimated_seconds"] == pytest.approx(sum(found["families"].values()))
    assert found["unknown"] == []


@pytest.mark.parametrize("kind", ["modules", "opaque"])
def test_modules_are_estimated_and_run(kind, graph):
    if kind == "opaque":
        pytest.importorskip("torch_geometric")
    found = estimates.cell(entries([kind])[0], 1, graph, profile("cpu"), 8)
    assert found["estimated_allocated"] > 0
    assert found["seconds"] > 0


MB = 10**6


def made(**more):
    cell = {
        "set": "queues", "queue": "gcn", "name": "gcn-4", "shape": "cora", "layers": 4, "tasks": 1, "status": "ok",
        "fits": True, "allocated": 100 * MB, "estimated_allocated": 99 * MB, "reserved": 2000 * MB,
        "estimated_reserved": 1850 * MB,
        "seconds": 2.0, "estimated_seconds": 1.0, "families": {"spmm": 0.5, "matmul": 0.5}, "unknown": [], "note": "",
        "estimate_seconds": 0.1,
    }  # fmt: skip
    return {**cell, **more}


def test_errors_and_what_is_below_the_truth():
    cells = [made(), made(estimated_allocated=104 * MB), made(fits=False, allocated=None), made(status="failed")]
    group = estimates.groups(cells)["queues T=1"]
    assert group["cells"] == 2
    assert group["allocated"]["worst"] == pytest.approx(0.04)
    assert group["allocated"]["lowest"] == pytest.approx(-0.01)
    assert group["allocated"]["below_with_margin"] == 0
    assert group["reserved"]["below_with_margin"] == 2


def test_opaque_modules_do_not_count_among_the_others():
    found = estimates.groups([made(), made(set="opaque", estimated_allocated=500 * MB)])
    assert (found["library"]["cells"], found["all"]["cells"]) == (1, 2)


def test_calibration_never_sees_what_it_corrects():
    # Every second training takes thrice what is predicted; each half is corrected by the other's factor.
    cells = [made(seconds=3.0 if place % 2 else 1.0) for place in range(20)]
    corrected = estimates.calibrated(cells)
    assert corrected[0] == pytest.approx(3.0, rel=0.05)
    assert corrected[1] == pytest.approx(1.0, rel=0.05)


def test_spearman():
    assert estimates.spearman([1.0, 2.0, 3.0], [10.0, 20.0, 40.0]) == pytest.approx(1.0)
    assert estimates.spearman([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)
    assert estimates.spearman([5.0, 1.0, 5.0], [2.0, 1.0, 2.0]) == pytest.approx(1.0)
    assert estimates.spearman([1.0], [1.0]) is None
    assert estimates.spearman([1.0, 1.0], [1.0, 2.0]) is None


def test_stacks_are_taken_of_some_and_never_of_opaque_ones():
    args = estimates.Namespace(sets="queues,opaque", tasks="1,4", every=1, stacked_every=10)
    found = estimates.chosen(args)
    assert sum(tasks == 1 for _, tasks in found) == 106
    assert sum(tasks == 4 for _, tasks in found) == 10


def test_trainings_are_estimated_anew_next_to_what_was_measured(tmp_path, monkeypatch, capsys):
    entry = next(one for one in entries(["queues"]) if one.shape == "cora")
    cell = made(name=entry.name, queue=entry.queue, layers=entry.layers, allocated=7 * 10**8, reserved=8 * 10**8)
    results, out = tmp_path / "measured.json", tmp_path / "again.json"
    cells = [cell, {**cell, "status": "failed"}, {**cell, "fits": False}]
    run = {"benchmark": "estimates", "environment": {}, "machine": profile("h200").to_dict()}
    results.write_text(json.dumps({**run, "cells": cells}))
    command = ["estimates", "--device", "cpu", "--against", str(results), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    estimates.main()
    (found,) = json.loads(out.read_text())["cells"]
    assert found["status"] == "ok", found
    assert (found["allocated"], found["reserved"], found["seconds"]) == (7 * 10**8, 8 * 10**8, 2.0)
    assert found["estimated_allocated"] > 10**8  # cuBLAS's workspaces alone: for a GPU, though there is none here
    assert "| queues, T = 1 | 1 |" in capsys.readouterr().out


def test_estimates_from_the_shell(tmp_path, monkeypatch, capsys):
    out = tmp_path / "estimates.json"
    command = ["estimates", "--device", "cpu", "--machine", "cpu", "--scale", "0.05", "--sets", "queues", "--shapes",
               "cora", "--every", "11", "--hidden", "4", "--tasks", "1", "--out", str(out)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    estimates.main()
    printed = capsys.readouterr().out
    assert "| queues, T = 1 |" in printed
    assert "100 tasks of one structure took" in " ".join(printed.split())
    assert {cell["status"] for cell in json.loads(out.read_text())["cells"]} == {"ok"}
