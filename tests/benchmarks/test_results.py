"""New runs go into the results file of their suite; every cell knows its run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.harness import recorder
from benchmarks.harness.recorder import earlier_cells
from benchmarks.harness.results import FOLDER, KEYS, NotKept, Results, merge


def write(path, date, cells, suite="epoch", **more):
    about = {"benchmark": suite, "environment": {"date": date, "command": "c", "device": "d"}, **more, "cells": cells}
    path.write_text(json.dumps(about))
    return path


def cell(side, ms, status="ok", **more):
    return {"shape": "cora", "model": "gcn", "side": side, "status": status, **({"ms": ms} if ms else {}), **more}


def test_newer_cells_replace_older_ones(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    first = write(tmp_path / "a.json", "2026-01-01", [cell("weft", 2.0), cell("pyg", 5.0), cell("cusparse", 3.0)])
    second = write(tmp_path / "b.json", "2026-01-02", [cell("weft", 1.0), cell("pyg", 4.0)], note="faster")
    merge(first, folder)
    assert merge(second, folder) == folder / "epoch.json"
    found = Results.of("epoch", folder)
    assert [run["date"] for run in found.runs] == ["2026-01-01", "2026-01-02"]
    assert found.runs[1]["note"] == "faster"
    assert {c["side"]: (c["ms"], c["run"]) for c in found.cells} == {
        "weft": (1.0, 1), "pyg": (4.0, 1), "cusparse": (3.0, 0)
    }  # fmt: skip
    assert found.find(side="pyg")["earlier_ms"] == [5.0]
    assert "earlier_ms" not in found.find(side="weft")


def test_the_order_of_merging_does_not_matter(tmp_path):
    old = Results.read(write(tmp_path / "a.json", "2026-01-01", [cell("pyg", 5.0)]))
    new = Results.read(write(tmp_path / "b.json", "2026-01-02", [cell("pyg", 4.0)]))
    for found in (old.with_newer(new), new.with_newer(old)):
        assert (found.find(side="pyg")["ms"], found.runs[0]["date"]) == (4.0, "2026-01-02")
        assert len(found.runs) == 1, "a run of which no cell is left is not kept"


def test_a_failure_does_not_replace_a_figure(tmp_path):
    old = Results.read(write(tmp_path / "a.json", "2026-01-01", [cell("pyg", 5.0)]))
    bad = [cell("pyg", None, "failed", error="out of memory"), cell("captured", None, "skipped", reason="large")]
    found = old.with_newer(Results.read(write(tmp_path / "b.json", "2026-01-02", bad)))
    assert found.find(side="pyg")["ms"] == 5.0
    assert found.any(side="captured")["reason"] == "large"
    assert found.find(side="captured") is None
    unknown = [cell("pyg", None, "skipped", reason="no time")]
    failed = Results.read(write(tmp_path / "c.json", "2026-01-03", bad))
    again = failed.with_newer(Results.read(write(tmp_path / "d.json", "2026-01-04", unknown)))
    assert again.any(side="pyg")["error"] == "out of memory", "a cell that was left out tells less than a failure"


@pytest.mark.parametrize(("out", "words"), [(Path("missing.json"), "no run to go on with in missing"), (None, "--out")])
def test_a_run_that_is_not_there_is_not_begun_anew(out, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=words):
        earlier_cells(out)


def test_a_file_of_several_runs_is_not_resumed(tmp_path):
    path = tmp_path / "epoch.json"
    Results("epoch", [{"date": "x"}], [cell("pyg", 1.0, run=0)]).write(path)
    with pytest.raises(SystemExit, match=r"benchmarks\.merge"):
        earlier_cells(path)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_every_kept_cell_has_a_run_and_one_key(path):
    found = Results.read(path)
    assert path.stem == found.benchmark.replace(" launch ", "_")
    assert all(run.get("date") and run.get("device") for run in found.runs)
    assert {c["run"] for c in found.cells} == set(range(len(found.runs)))
    if path.stem in KEYS:
        keys = [tuple(c.get(name) for name in KEYS[path.stem]) for c in found.cells]
        assert len(set(keys)) == len(keys)


def test_the_command_names_the_module():
    argv = ["/x/benchmarks/suites/epoch.py", "--shapes", "cora", "--out", "/tmp/y/epoch.json"]
    assert recorder.command(argv) == "python -m benchmarks.suites.epoch --shapes cora --out epoch.json"
    assert recorder.command(["/x/benchmarks/tables.py"]) == "python -m benchmarks.tables"


def test_a_run_on_smaller_graphs_is_not_kept(tmp_path):
    path = write(tmp_path / "a.json", "2026-01-01", [cell("weft", 2.0)])
    data = json.loads(path.read_text())
    data["environment"]["command"] = "python -m benchmarks.suites.epoch --scale 0.1"
    path.write_text(json.dumps(data))
    with pytest.raises(NotKept, match="--scale"):
        merge(path, tmp_path)


def test_a_commit_that_is_given_wins_over_git(monkeypatch):
    monkeypatch.setenv("WEFT_COMMIT", "abc1234")
    assert recorder.commit() == "abc1234"
    monkeypatch.setenv("PATH", "")
    assert recorder.commit() == "abc1234"


def test_a_copy_inside_another_checkout_has_no_commit_of_its_own(tmp_path, monkeypatch):
    monkeypatch.delenv("WEFT_COMMIT", raising=False)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True, capture_output=True)
    copy = tmp_path / "copy"
    copy.mkdir()
    monkeypatch.setattr(recorder, "ROOT", copy)
    assert recorder.commit() is None
    monkeypatch.setattr(recorder, "ROOT", tmp_path)
    assert recorder.commit() is not None
    monkeypatch.setenv("WEFT_COMMIT", "abc1234")
    monkeypatch.setattr(recorder, "ROOT", copy)
    assert recorder.commit() == "abc1234"


def test_without_a_repository_the_commit_is_unknown(monkeypatch):
    monkeypatch.delenv("WEFT_COMMIT", raising=False)
    monkeypatch.setenv("PATH", "")
    assert recorder.commit() is None
