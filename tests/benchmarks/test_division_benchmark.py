"""The division benchmark in its quick mode: cells for every side, a report, and the simulator beside the epochs."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.suites import division

pytestmark = pytest.mark.timeout(240)


def test_quick_mode_compares_sides_and_ratios(monkeypatch, tmp_path, capsys):
    short = {shape: {key: value / 10 for key, value in some.items()} for shape, some in division.QUICK.items()}
    monkeypatch.setattr(division, "QUICK", short)
    out = tmp_path / "division.json"
    words = ["--quick", "--shapes", "uk", "--models", "sage", "--workers", "2", "--batches", "6", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["division", *words, "--ratios", "2", "--out", str(out)])
    division.main()
    cells = json.loads(out.read_text())["cells"]
    assert {cell["side"] for cell in cells} == {"profile", "host", "device", "weft", "share 0.50"}
    assert all(cell["status"] == "ok" for cell in cells), cells
    for cell in cells:
        if cell["side"] != "profile":
            assert cell["epoch_seconds"] > 0
            assert cell["simulated_seconds"] > 0
    told = capsys.readouterr().out
    assert "better side / weft" in told
    assert "simulator within 10 % of measured epochs" in told
