"""Suites on a CPU: every side of a sweep's epochs is timed, and ratios of memory are summed up."""

from __future__ import annotations

import math
from argparse import Namespace

import pytest

from benchmarks.suites.on_cpu import memory, never_slower, whole_process
from benchmarks.suites.on_gpu import never_slower as on_gpu
from weft.graph.generate import citation

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def test_every_side_of_a_sweep_is_timed():
    graph = citation(80, 400, 10, 3, seed=2, name="tiny")
    found = never_slower.measure("own-layernorm-gcn", graph, graph.x, Namespace(tasks=2, runs=1))
    assert found["stacks"] in (1, 2)
    for side in never_slower.SIDES:
        assert found[f"{side}_ms"] > 0
    assert found["turn_over_sweep"] == pytest.approx(found["turn_ms"] / found["sweep_ms"], rel=0.02)
    cells = [{"graph": "tiny", "module": "a", "status": "ok", **found}]
    assert never_slower.worst(cells)["turn_over_sweep"] == found["turn_over_sweep"]
    ratios = [found["turn_over_sweep"], found["loop_over_sweep"]]
    assert never_slower.table(cells, ["missing", "tiny"]) == [["a", None, None, *ratios]]


def test_memory_is_summed_up():
    assert len(memory.CASES) == 20
    found = memory.summary([{"taken_over_predicted": 1.2}, {"taken_over_predicted": 0.9}, {"status": "failed"}])
    assert found == {"runs": 2, "least": 0.9, "most": 1.2, "above_1.10": 1}
    assert memory.summary([]) == {}


def test_both_scripts_train(tmp_path):
    pytest.importorskip("torch_geometric")
    path = whole_process.graph_file(tmp_path)
    for side in whole_process.SCRIPTS:
        assert 0.0 < whole_process.run_script(side, path, 2, tmp_path)["accuracy"] <= 1.0


def test_a_sweep_on_a_gpu_against_its_tasks_in_turn():
    """On a CPU, as far as it goes: planned, built, timed and told."""
    graph = citation(80, 400, 10, 3, seed=2, name="tiny")
    found = on_gpu.measure("own-layernorm-gcn", graph, Namespace(tasks=2, runs=1))
    assert found["turn_over_sweep"] == pytest.approx(found["turn_ms"] / found["sweep_ms"], rel=1e-2)
    assert found["join"] in ("stacked", "in turn")
    cells = [{"status": "ok", "graph": "g", "module": "m", **found}, {"status": "failed", "graph": "g", "module": "n"}]
    assert on_gpu.table(cells) == [["m", found["turn_over_sweep"]], ["n", None]]
    assert found["rounds"] > 1 or found["spread"] == math.inf
    assert on_gpu.summary(cells)["missing"] == 1


def test_what_was_not_measured_or_is_not_steady_has_not_passed():
    well = {"status": "ok", "turn_over_sweep": 1.2, "spread": 0.01, "sweep_made_s": 2.0, "turn_made_s": 1.0}
    assert on_gpu.summary([well])["passed"]
    for other in ({"status": "skipped"}, {**well, "turn_over_sweep": 0.94}, {**well, "spread": 0.1}):
        assert not on_gpu.summary([well, other])["passed"]
    assert not on_gpu.summary([])["passed"]
    noisy, steady = {"turn": [1.0, 3.0], "sweep": [1.0, 1.0]}, {"turn": [2.0, 2.02], "sweep": [1.0, 1.0]}
    assert on_gpu.spread(noisy) > on_gpu.STEADY > on_gpu.spread(steady)
    assert on_gpu.spread({"turn": [1.0], "sweep": [1.0]}) == math.inf
