"""The suite that compares tuners, on a small graph."""

from __future__ import annotations

import json
import sys

from benchmarks.suites import tuning


def test_tuners_train_as_many_epochs_and_prepare_a_step_once(tmp_path, monkeypatch, capsys):
    from tests.graphs_for_tests import SHARED_DATA

    words = ["--data", str(SHARED_DATA), "--graph", "cora", "--repeats", "2", "--trials", "4", "--epochs", "6"]
    words += ["--width", "2", "--tuners", "random,asha,pbt", "--device", "cpu", "--out", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["tuning", *words])
    tuning.main()
    cells = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["cells"]
    assert [cell["status"] for cell in cells] == ["ok"] * 6
    assert {cell["prepares"] for cell in cells} == {1}
    assert all(24 <= cell["epochs"] <= 24 + 2 * 6 for cell in cells)
    assert "| asha | 0." in capsys.readouterr().out
