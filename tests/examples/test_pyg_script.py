"""The ported script gives the numbers of the one written with PyG, and few of its lines are new."""

from __future__ import annotations

import difflib
import runpy
from pathlib import Path

import pytest

pytest.importorskip("torch_geometric")
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_same_numbers_in_under_ten_changed_lines():
    plain, ported = EXAMPLES / "pyg_script.py", EXAMPLES / "pyg_script_ported.py"
    lines = [path.read_text(encoding="utf-8").splitlines() for path in (plain, ported)]
    changes = [line for line in difflib.ndiff(*lines) if line.startswith("+ ")]
    assert len(changes) < 10
    theirs, ours = (runpy.run_path(str(path))["history"] for path in (plain, ported))
    for column in ("loss", "val_loss"):
        assert len(ours[column]) == 50
        assert ours[column] == pytest.approx(theirs[column], abs=1e-4)
    assert theirs["loss"][-1] < 0.8 * theirs["loss"][0]
