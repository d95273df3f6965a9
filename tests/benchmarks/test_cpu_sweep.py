"""The sweep on a CPU: every member trains on both sides, and accuracies are compared setting by setting."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.baselines.pyg_training import Outcome
from benchmarks.suites.on_cpu import cpu, cpu_sweep
from weft.graph.generate import citation

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def graph():
    return citation(80, 400, 10, 3, seed=2, name="tiny")


@pytest.mark.parametrize("side", cpu_sweep.SIDES)
def test_cpu_sweep_trains_every_member(side, graph):
    pytest.importorskip("torch_geometric")
    chosen = cpu_sweep.paper_sweep(graph, epochs=3, seeds=2, hidden=(4, 8))
    found = cpu_sweep.measure(side, chosen, graph, graph.x, graph.edge_index())
    assert len(found["tests"]) == len(chosen) == 8
    assert all(0.0 <= test <= 1.0 for test in found["tests"])


def test_pyg_gets_its_best_number_of_threads(graph, monkeypatch):
    """Whichever is faster is taken; here one thread is made to be."""
    outcome = lambda *_: Outcome(0.0, 0.0, 1, float(torch.get_num_threads()))  # noqa: E731
    monkeypatch.setattr(cpu, "train_pyg", outcome)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert cpu.faster_threads(graph, graph.x, graph.edge_index(), 2) == 1
    finally:
        torch.set_num_threads(before)


def test_cpu_sweep_compares_setting_by_setting(graph):
    chosen = cpu_sweep.paper_sweep(graph, epochs=3, seeds=2, hidden=(4,))
    tests = {"weft": [0.8, 0.82, 0.5, 0.52], "pyg": [0.8, 0.82, 0.7, 0.72]}
    cells = [
        {"side": side, "turn": 1, "status": "ok", "tests": found, "train_seconds": seconds}
        for (side, found), seconds in zip(tests.items(), (2.0, 20.0), strict=True)
    ]
    rows = cpu_sweep.accuracies(cells, chosen)
    assert [row["difference"] for row in rows] == [0.0, pytest.approx(-14.142, rel=1e-3)]
    assert cpu_sweep.times(cells)["ratio"] == pytest.approx(10.0)
    assert math.isinf(cpu_sweep.compare([1.0, 1.0], [2.0, 2.0])["difference"])
