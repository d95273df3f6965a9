"""The sampling benchmark runs on a CPU: its cells there succeed, those of a GPU are recorded as skipped."""

from __future__ import annotations

import json
import sys

from benchmarks.suites import sampling


def test_cells_of_a_cpu(tmp_path, monkeypatch, capsys):
    out = tmp_path / "sampling.json"
    options = ["--shapes", "arxiv", "--scale", "0.02", "--rows", "500", "--batches", "3", "--cell-seconds", "0.01"]
    monkeypatch.setattr(sys, "argv", ["sampling", "--device", "cpu", "--out", str(out), *options])
    sampling.main()
    cells = json.loads(out.read_text())["cells"]
    done = {(cell["work"], cell["side"]): cell["status"] for cell in cells}
    assert done["gather", "cpu"] == done["three hops", "cpu x 1"] == "ok"
    assert {status for key, status in done.items() if "cpu" not in key[1]} == {"skipped"}
    assert "three hops" in capsys.readouterr().out
