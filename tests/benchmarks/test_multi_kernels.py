"""The kernel benchmark of many tasks computes the same numbers on every side, and runs on a tiny graph."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks.baselines.cusparse_models import edge_values
from benchmarks.suites.kernels import multi_kernels
from benchmarks.suites.kernels.passes import Passes
from weft.graph.generate import citation

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def graph():
    return citation(90, 500, 4, 3, seed=3, directed=True)


@pytest.mark.parametrize("side", multi_kernels.SIDES)
@pytest.mark.parametrize("tasks", [1, 3])
def test_sides_are_exact(side, tasks, graph):
    matrix = graph.adj.gcn()
    operands = multi_kernels.Operands(matrix, edge_values(matrix), tasks, 5)
    found = multi_kernels.measure(side, operands, None, 0.01)
    assert found["error"] < 1e-6
    assert found["ms_a_task"] == pytest.approx(found["ms"] / tasks, abs=1e-4)


def test_a_task_in_the_wrong_place_is_noticed(graph):
    matrix = graph.adj.gcn()
    operands = multi_kernels.Operands(matrix, edge_values(matrix), 2, 5)
    right = torch.stack([torch.sparse.mm(matrix_csr(matrix), x) for x in operands.xs[-1]])
    assert operands.error(right) < 1e-6
    assert operands.error(right.flip(0)) > 0.1


def matrix_csr(matrix):
    return multi_kernels.csr(matrix, edge_values(matrix))


@pytest.mark.parametrize("side", Passes.SIDES[:-1])
def test_passes_are_exact(side, graph):
    calls, error = Passes(graph.adj, 2, 3, 4).side(side)
    assert error < 1e-6
    assert [tuple(out.shape) for out in calls[0]()] == [(90, 4)] * 5


def test_it_runs_from_the_shell(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    command = ["multi_kernels", "--device", "cpu", "--scale", "0.003", "--tasks", "2", "--features", "4",
               "--cell-seconds", "0.01", "--out", str(out)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    multi_kernels.main()
    printed = capsys.readouterr().out
    assert "T separate/Weft" in printed
    assert "| length (planned) |" in printed
    assert "| cluster          |" in printed
    assert "joined: " in printed
    assert out.exists()
