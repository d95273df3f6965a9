"""The scripts of examples/pyg: as accurate with Weft as by hand, and their lines are counted right."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch_geometric")
FOLDER = Path(__file__).parents[2] / "examples" / "pyg"
SCRIPTS = ("gcn", "gat", "gin", "sage", "rgcn")


@pytest.fixture
def imported(monkeypatch):
    """A module of the folder by its name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", ["script"])  # the graph that comes with Weft
    names = {path.stem for path in FOLDER.glob("*.py")}
    yield lambda name: importlib.import_module(name)
    for name in names:
        sys.modules.pop(name, None)


def lines_of(function):
    """Lines of the body, without the docstring."""
    lines = inspect.getsource(function).splitlines()[1:]
    return len([line for line in lines if not line.strip().startswith('"""')])


@pytest.mark.parametrize("name", SCRIPTS)
def test_lines_are_counted_right(name, imported):
    script, train = imported(name), imported("loop").train
    counted = re.search(r"Lines: (\d+) with Weft, (\d+) by hand and (\d+) in its loop", script.__doc__)
    assert [int(count) for count in counted.groups()] == [
        lines_of(function) for function in (script.with_weft, script.by_hand, train)
    ]


@pytest.mark.rest
@pytest.mark.parametrize("name", SCRIPTS)
def test_both_sides_are_as_accurate(name, imported):
    script, data = imported(name), imported("loop").read_data()
    ours, theirs = ([side(data.clone(), seed) for seed in range(2)] for side in (script.with_weft, script.by_hand))
    error = imported("compare").standard_errors(ours, theirs)
    assert error < 3 or abs(sum(ours) - sum(theirs)) / 2 < 0.02, (ours, theirs)
