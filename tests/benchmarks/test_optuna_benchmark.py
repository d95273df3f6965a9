"""A study is trained through both sides, and both say what came of it."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

pytest.importorskip("optuna")
pytest.importorskip("torch_geometric")

from benchmarks.suites import optuna_search
from tests.graphs_for_tests import tiny_graph

pytestmark = [pytest.mark.rest, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")]


def test_both_sides_train_a_study(tmp_path, monkeypatch, capsys):
    graph = tiny_graph()
    arrays = {name: getattr(graph, name).numpy() for name in ("x", "y", "train", "val", "test")}
    np.savez(tmp_path / "tiny.npz", edge_index=graph.edge_index().numpy(), **arrays)
    out = tmp_path / "out.json"
    command = ["optuna_search", "--device", "cpu", "--data", str(tmp_path), "--graphs", "tiny", "--studies", "1"]
    command += ["--trials", "8", "--width", "6", "--workers", "2", "--epochs", "10", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    optuna_search.main()
    weft_cell, pyg_cell = cells = json.loads(out.read_text())["cells"]
    assert (weft_cell["side"], pyg_cell["side"]) == ("weft", "pyg")
    for cell in cells:
        assert cell["status"] == "ok", cell
        assert (cell["trials"], cell["failed"]) == (8, 0)
        assert 0 < cell["epochs"] <= 80
        assert 0 <= cell["test"] <= 1
        assert 0 < cell["val"] <= 1
    assert "| tiny | 0 | pyg |" in capsys.readouterr().out
