"""SweepResult: the best member, rows, files, and members that went wrong among them."""

from __future__ import annotations

import builtins
import json
import sys

import pytest

from tests.engine.sweeps import made
from weft.core.errors import SpecError
from weft.core.sweep import Sweep
from weft.engine.page import render_sweep_report
from weft.engine.sweep_result import folder_names

SWEEP = Sweep("cora", hidden=[16, 64], lr=[0.1, 0.01], seed=[0, 1], name="mine")


def score(task):
    return 0.5 + task.hidden / 1000 + task.lr + task.seed / 100


@pytest.fixture
def result():
    return made(SWEEP, score, broken=["hidden=64 lr=0.1 seed=1"])


def test_the_best_member(result):
    assert result.best().name == "hidden=64 lr=0.1 seed=0"
    assert result.best("val_loss").name == "hidden=64 lr=0.1 seed=0", "a loss is better when lower"
    assert result.best("test_accuracy").metrics["test_accuracy"] == max(
        r.metrics.get("test_accuracy", 0) for r in result
    )
    with pytest.raises(SpecError, match=r"no member of 'mine' has the metric 'val_f1'; they have .*val_accuracy"):
        result.best("val_f1")


def test_members_by_name_and_position(result):
    assert len(result) == 8
    assert result["hidden=16 lr=0.01 seed=0"].task.lr == 0.01
    assert result[0] is result.tasks[0]
    assert result.statuses == {"finished": 7, "diverged": 1}
    assert repr(result) == (
        "<SweepResult 'mine': 8 tasks, 7 finished, 1 diverged; best 'hidden=64 lr=0.1 seed=0', val_accuracy=0.6640>"
    )
    with pytest.raises(KeyError, match="no member 'x'"):
        result["x"]


def test_rows(result):
    rows = result.to_dicts()
    assert [row["name"] for row in rows] == [task.name for task in SWEEP]
    assert rows[0]["hidden"] == 16
    assert rows[0]["val_accuracy"] == pytest.approx(0.616)
    assert rows[5]["status"] == "diverged"
    assert "became nan" in rows[5]["message"]
    frame = result.to_pandas()
    assert frame.groupby("hidden")["val_accuracy"].mean().idxmax() == 64


def test_without_pandas(result, monkeypatch):
    real = builtins.__import__

    def missing(name, *rest):
        if name == "pandas":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(SpecError, match=r"to_pandas\(\) needs pandas"):
        result.to_pandas()


def test_nothing_to_choose_from():
    result = made(Sweep("cora", lr=[0.1, 0.2]), score, broken=["lr=0.1", "lr=0.2"])
    with pytest.raises(SpecError, match="has the metric 'val_accuracy'"):
        result.best()
    assert result.to_dict()["best"] is None


def test_files(result, tmp_path):
    result.save(tmp_path)
    saved = json.loads((tmp_path / "result.json").read_text())
    assert saved["best"] == "hidden=64 lr=0.1 seed=0"
    assert saved["statuses"] == {"finished": 7, "diverged": 1}
    assert Sweep.from_dict(saved["sweep"]) == SWEEP
    folders = {path.name for path in (tmp_path / "tasks").iterdir()}
    assert "hidden=16_lr=0.1_seed=0" in folders
    assert len(folders) == 8
    member = json.loads((tmp_path / "tasks" / "hidden=64_lr=0.1_seed=1" / "result.json").read_text())
    assert member["status"] == "diverged"
    assert "became nan" in member["message"]


def test_folders_have_names_that_can_be_folders():
    names = ["../x/y", "a_b-3", "a b", "a_b", "A_b", "", "é", "x" * 300]
    folders = folder_names(names)
    assert len({folder.lower() for folder in folders}) == len(names)
    for folder in folders:
        assert "/" not in folder
        assert folder.strip(".")
        assert len(folder) < 120


def calls_of(function, *given) -> int:
    """Functions that ``function(*given)`` calls, in all."""
    count = 0

    def look(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(look)
    try:
        function(*given)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("graphs", [1, 10], ids=["one graph", "ten graphs"])
@pytest.mark.parametrize("what", ["to_dict", "summary", "page"])
def test_the_end_of_a_sweep_is_linear_in_its_tasks(what, graphs):
    def end_of(tasks):
        names = "cora" if graphs == 1 else [f"graph-{i}" for i in range(graphs)]
        rates = [0.001 * (1 + i) for i in range(tasks // (10 * graphs))]
        result = made(Sweep(names, hidden=[16, 64], lr=rates, seed=range(5)), score)
        return calls_of(render_sweep_report if what == "page" else lambda one: getattr(one, what)(), result)

    assert end_of(800) < 5 * end_of(200), "four times as many tasks, about four times the work"


def test_a_summary_is_what_the_whole_says(result):
    whole, summary = result.to_dict(), result.summary()
    assert {key: whole[key] for key in summary} == summary
    assert "tasks" not in summary
