"""The example with Optuna runs on a CPU and prints the best trial."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("optuna")
EXAMPLE = Path(__file__).parents[2] / "examples" / "optuna_search.py"


@pytest.mark.rest
def test_a_study_trains_and_prints_its_best_trial(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--trials", "16", "--width", "8", "--epochs", "10"])
    ran = runpy.run_path(str(EXAMPLE))
    assert len(ran["result"]) == len(ran["study"].trials) == 16
    assert f"{ran['study'].best_value:.3f} on validation nodes" in capsys.readouterr().out
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 40
