"""The division benchmark in its quick mode: cells for every side, a report, and the simulator beside the epochs."""

from __future__ import annotations

import json
import sys
from argparse import Namespace

import pytest

from benchmarks.suites import division

pytestmark = pytest.mark.timeout(240)


def test_quick_mode_compares_sides_and_ratios(monkeypatch, tmp_path, capsys):
    short = {shape: {key: value / 10 for key, value in some.items()} for shape, some in division.QUICK.items()}
    monkeypatch.setattr(division, "QUICK", short)
    out = tmp_path / "division.json"
    words = ["--quick", "--shapes", "uk", "--models", "sage", "--workers", "2", "--batches", "6", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["division", *words, "--ratios", "2", "--budgets", "12", "--out", str(out)])
    division.main()
    cells = json.loads(out.read_text())["cells"]
    assert {cell["side"] for cell in cells} == {"profile", "host", "device", "weft", "share 0.50", "planned"}
    assert all(cell["status"] == "ok" for cell in cells), cells
    for cell in cells:
        if cell["side"] not in ("profile", "planned"):
            assert cell["epoch_seconds"] > 0
            assert cell["simulated_seconds"] > 0
    told = capsys.readouterr().out
    assert "better side / weft" in told
    assert "within 12 GiB: features gpu, edges gpu" in told
    assert "simulator within 10 % of measured epochs" in told


def test_a_shape_keeps_to_its_share_of_the_time(monkeypatch, tmp_path):
    out = tmp_path / "division.json"
    monkeypatch.setattr(division, "SHARES", {"products": -1.0})
    words = ["--quick", "--shapes", "products", "--models", "sage", "--budgets", "", "--budget-seconds", "100"]
    monkeypatch.setattr(sys, "argv", ["division", *words, "--out", str(out)])
    division.main()
    assert not out.exists() or json.loads(out.read_text())["cells"] == []


def test_worker_counts_from_the_most_down():
    args = Namespace(workers="1,2,8", few_workers="2,8", all_workers=False)
    assert division._counts(args, whole=True) == [8, 2, 1]
    assert division._counts(args, whole=False) == [8, 2]
