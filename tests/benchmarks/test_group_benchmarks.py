"""The benchmarks of groups run on tiny graphs, and their tables say what was measured."""

from __future__ import annotations

import math
import sys
from argparse import Namespace

import pytest
import torch

from benchmarks.baselines.epochs import Setting
from benchmarks.harness.recorder import NotHere
from benchmarks.suites import heterogeneous, never_slower, sweep
from weft.graph.generate import citation

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def graph():
    return citation(80, 400, 10, 3, seed=2, name="tiny")


# ---- sweeps ------------------------------------------------------------------------------------------


def test_the_tasks_of_a_sweep_differ(graph):
    tasks = sweep.sweep_tasks(sweep.CASES[0], graph, Setting(2, 4), 5)
    assert len({task.lr for task in tasks}) == len({task.dropout for task in tasks}) == 5
    assert [task.seed for task in tasks] == [0, 1, 2, 3, 4]
    assert min(task.lr for task in tasks) == pytest.approx(1e-3)
    assert max(task.lr for task in tasks) == pytest.approx(1e-2)


def test_cases_have_names_of_their_own():
    names = [case.name for case in sweep.CASES]
    assert len(set(names)) == len(names)
    assert "arxiv-gcn-bf16" in names


@pytest.mark.parametrize("case", [case for case in sweep.CASES if case.shape == "arxiv"], ids=lambda case: case.name)
def test_a_sweep_is_measured_per_task(case, graph):
    found = sweep.measure_sweep(case, graph, Setting(case.layers, 8), 3, 0.01)
    assert found["ms"] == pytest.approx(found["epoch_ms"] / 3, abs=1e-4)
    assert found["notes"] == []


def test_pyg_is_measured_in_the_precision_of_a_sweep(graph, tmp_path):
    pytest.importorskip("torch_geometric")
    cases = [case for case in sweep.CASES if case.shape == "arxiv" and case.model == "gcn"]
    assert [case.precision for case in sweep.baseline_cases("captured", cases)] == ["fp32", "tf32", "bf16"]
    assert [case.precision for case in sweep.baseline_cases("cusparse", cases)] == ["fp32"]
    for side in ("pyg", "captured"):
        args = Namespace(compile_large=False)
        found = sweep.checked(side, "gcn", graph, Setting(2, 8), "source", args, cases[-1].precision)
        assert found["ms"] > 0


def test_sweep_from_the_shell(tmp_path, monkeypatch, capsys):
    command = ["sweep", "--device", "cpu", "--scale", "0.05", "--cases", "cora-gcn", "--tasks", "1,3",
               "--sides", "weft,cusparse", "--seconds", "0.01", "--out", str(tmp_path / "out.json")]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    sweep.main()
    printed = capsys.readouterr().out
    assert "| cora | GCN | 3 | fp32 |" in printed


# ---- different structures ----------------------------------------------------------------------------


def options(**more) -> Namespace:
    return Namespace(hidden=8, seconds=0.01, epochs=2, scale=0.05, process_seconds=60.0, **more)


@pytest.mark.parametrize("side", ["woven", "stacks", "sequence"])
def test_different_tasks_are_measured(side, graph):
    found = heterogeneous.measure(side, "depths", graph, options())
    assert found["ms"] > 0
    assert found["groups"] == {"woven": 1, "stacks": 3, "sequence": 4}[side]
    assert found["notes"] == []
    assert (found["matching_seconds"] > 0) == (side == "woven")


def test_a_process_trains_by_itself(graph, monkeypatch):
    monkeypatch.setitem(heterogeneous.CASES, "one", ("cora", [{"model": "gcn", "layers": 1}]))
    found = heterogeneous.measure("processes", "one", graph, options())
    assert len(found["own_ms"]) == 1
    assert found["ms"] > 0


def test_a_worker_that_fails_says_why(graph, monkeypatch):
    monkeypatch.setitem(heterogeneous.CASES, "bad", ("cora", [{"model": "gcn", "layers": 0}]))
    with pytest.raises(RuntimeError, match=r"worker 0 ended: .*layers=0 must be at least 1"):
        heterogeneous.measure("processes", "bad", graph, options())


def test_no_service_is_a_note_and_no_crash(graph, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotHere, match="is not installed"):
        heterogeneous.measure("mps", "depths", graph, options())


# ---- whole runs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", heterogeneous.RUNS)
def test_whole_runs_are_measured(side, graph):
    args = Namespace(hidden=8, evaluate_every=None, run_repeats=1)
    found = heterogeneous.measure_runs(side, "depths", graph, torch.device("cpu"), 2, args)
    assert found["seconds"] > 0
    expected = {"runs": ["1 solo"] * 4, "run": ["2 stacked", "1 solo", "1 solo"], "run_woven": ["4 woven"]}
    assert found["groups"] == expected[side]


def test_a_run_that_ends_badly_is_no_measurement(graph):
    settings = [{**one, "epochs": 3, "eval_every": 3} for one in heterogeneous.settings_of("depths", 8)]
    settings[1]["lr"] = 1e30
    with pytest.raises(RuntimeError, match="diverged"):
        heterogeneous.train("run", settings, graph, torch.device("cpu"))


def test_heterogeneous_from_the_shell(tmp_path, monkeypatch, capsys):
    command = ["heterogeneous", "--device", "cpu", "--scale", "0.01", "--cases", "depths", "--sides", "runs,run",
               "--run-epochs", "2,3", "--run-repeats", "1", "--hidden", "8",
               "--out", str(tmp_path / "out.json")]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    heterogeneous.main()
    printed = capsys.readouterr().out
    assert "| GCN of 2, 2, 3, 4 layers, pubmed | 2 |" in printed
    assert "| GCN of 2, 2, 3, 4 layers, pubmed | 3 |" in printed


# ---- users' modules ----------------------------------------------------------------------------------


def test_a_sweep_is_measured_against_its_tasks_in_turn(graph):
    found = never_slower.measure("own-layernorm-gcn", graph, Namespace(tasks=2, runs=1))
    assert found["turn_over_sweep"] == pytest.approx(found["turn_ms"] / found["sweep_ms"], rel=1e-2)
    assert found["join"] in ("stacked", "in turn")
    cells = [{"status": "ok", "graph": "g", "module": "m", **found}, {"status": "failed", "graph": "g", "module": "n"}]
    assert found["rounds"] > 1 or found["spread"] == math.inf
    assert never_slower.summary(cells)["missing"] == 1


def test_what_was_not_measured_or_is_not_steady_has_not_passed():
    well = {"status": "ok", "turn_over_sweep": 1.2, "spread": 0.01, "sweep_made_s": 2.0, "turn_made_s": 1.0}
    assert never_slower.summary([well])["passed"]
    for other in ({"status": "skipped"}, {**well, "turn_over_sweep": 0.94}, {**well, "spread": 0.1}):
        assert not never_slower.summary([well, other])["passed"]
    assert not never_slower.summary([])["passed"]
    noisy, steady = {"turn": [1.0, 3.0], "sweep": [1.0, 1.0]}, {"turn": [2.0, 2.02], "sweep": [1.0, 1.0]}
    assert never_slower.spread(noisy) > never_slower.STEADY > never_slower.spread(steady)
    assert never_slower.spread({"turn": [1.0], "sweep": [1.0]}) == math.inf
