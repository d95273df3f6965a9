"""The R-GCN benchmark runs on a tiny likeness of its shapes and says what it could not do."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.suites import rgcn

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def test_every_cell_is_measured_or_says_why_not(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch_geometric")
    out = tmp_path / "out.json"
    command = ["rgcn", "--device", "cpu", "--scale", "0.002", "--shapes", "bgs", "--steps", "2", "--warmup", "1",
               "--batch", "16", "--seconds", "0.1", "--out", str(out)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    rgcn.main()
    cells = json.loads(out.read_text())["cells"]
    assert len(cells) == 11
    for cell in cells:
        if (cell["side"], cell["mode"]) == ("pyg", "sampled together") and cell["status"] != "ok":
            assert "NeighborLoader needs" in cell["reason"]
        else:
            assert cell["status"] == "ok", cell
            assert cell["ms"] > 0
    assert "sampled each" in capsys.readouterr().out
