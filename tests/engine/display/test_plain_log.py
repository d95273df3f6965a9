"""Plain lines for logs, and the output of a notebook, from events alone."""

from __future__ import annotations

import io

import pytest

import weft
from weft.core.errors import SpecError
from weft.core.event import Event
from weft.engine.display import NotebookDisplay, PlainLog, display_for, in_notebook


def events_of(work):
    found = []
    weft.run(work, device="cpu", progress=False, on_event=found.append)
    return found


@pytest.fixture(scope="module")
def of_a_task():
    return events_of(weft.Task(graph="demo", hidden=8, epochs=4, name="one"))


@pytest.fixture(scope="module")
def of_a_sweep():
    return events_of(weft.Sweep("demo", hidden=[4, 8], seed=[0, 1], epochs=4))


def lines(events, **options):
    file = io.StringIO()
    with PlainLog(file, **options) as log:
        for event in events:
            log(event)
    return file.getvalue().splitlines()


def test_a_task_is_told_from_the_plan_to_the_end(of_a_task):
    said = lines(of_a_task, every=0.0)
    assert all(line[9:13] == " s  " for line in said)
    assert all(float(line[:9]) >= 0 for line in said)
    words = [line[13:] for line in said]
    assert words[0] == "planned: 1 task"
    assert words[1].startswith("one: ")
    assert "on demo (2,400 nodes, 9,600 edges)" in words[1]
    assert any(word.startswith("epoch 4/4 loss ") and " val 0." in word and " best 0." in word for word in words)
    assert words[-1].startswith("one: finished; val accuracy 0.")


def test_progress_is_told_every_so_often(of_a_task):
    assert sum("/4 loss" in line for line in lines(of_a_task, every=1e6)) == 1


def test_a_sweep_is_told_with_every_end(of_a_sweep):
    words = [line[13:] for line in lines(of_a_sweep, every=0.0)]
    assert words[0].startswith("planned: 4 tasks")
    assert sum(": finished after epoch 4, best val 0." in word for word in words) == 4
    assert any("task epochs" in word for word in words)
    assert "; best settings hidden=" in words[-1]


def test_what_goes_wrong_is_told():
    said = lines([Event("note", "a", {"message": "be careful"}), Event("interrupted", "a", {"epoch": 3})])
    assert [line[13:] for line in said] == ["be careful", "interrupted after epoch 3"]


def test_a_run_shows_plain_lines_on_request(capsys):
    weft.run(weft.Task(graph="demo", hidden=4, epochs=1, name="one"), device="cpu", progress="plain")
    said = capsys.readouterr()
    assert said.out == ""
    assert "one: finished" in said.err


def test_a_script_in_a_pipe_prints_notes_and_the_outcome(capsys):
    """Neither a line per member nor progress, and nothing at all with ``progress=False``."""
    members = weft.Sweep("demo", hidden=[4, 8], seed=[0, 1], epochs=2, optimizer="sgd", lr=[0.1, 1e30], name="wild")
    weft.run(members, device="cpu")
    said = capsys.readouterr()
    assert said.out == ""
    lines = [line[13:] for line in said.err.splitlines()]
    assert lines[-1].startswith("wild: finished (4 finished, 4 diverged); best settings hidden=")
    assert "over 2 seeds" in lines[-1]
    assert sum(": diverged after epoch" in line for line in lines) == 4
    assert not any(": finished after" in line or "task epochs" in line for line in lines)
    weft.run(members, device="cpu", progress=False)
    assert capsys.readouterr().err == ""


def test_notes_reach_a_pipe(capsys):
    with pytest.warns(RuntimeWarning):
        weft.run(weft.Task(graph="demo", epochs=1, hidden=4), device="cpu", on_event=lambda event: 1 / 0)
    assert "on_event raised ZeroDivisionError" in capsys.readouterr().err


def test_long_runs_and_large_sweeps_print_few_lines(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    file = io.StringIO()
    log = PlainLog(file)
    progress = {"epoch": 1, "epochs": 9, "loss": 1.0}
    for _ in range(8 * 3600):
        now[0] += 1.0
        log(Event("progress", "a", progress))
    assert 50 < len(file.getvalue().splitlines()) < 200
    log(Event("start", "a", {"metric": "accuracy", "tasks": 500, "graph": GRAPH, "device": "cpu"}))
    before = file.getvalue()
    log(Event("end", "b", {"status": "finished", "metrics": {"epochs_run": 3}}))
    assert file.getvalue() == before
    log(Event("end", "b", {"status": "failed", "metrics": {"epochs_run": 3}, "message": "no"}))
    assert file.getvalue().splitlines()[-1].endswith("b: failed after epoch 3")


GRAPH = {"name": "g", "nodes": 3, "edges": 4}


def test_what_there_is_to_choose_from():
    assert display_for(False) is None
    assert isinstance(display_for("plain"), PlainLog)
    with pytest.raises(SpecError, match=r"progress='loud' must be True, False, 'auto', 'live' or 'plain'"):
        display_for("loud")


def test_a_notebook_shows_the_last_lines_and_a_bar(of_a_task, of_a_sweep):
    assert not in_notebook()
    shown = NotebookDisplay()
    for event in of_a_task:
        shown(event)
    assert '<progress value="1.000"' in shown.html()
    assert "one: finished" in shown.html()
    assert "epoch 4/4 loss" in shown.html(), "the last epoch, not the last that was drawn"
    assert "<progress" not in NotebookDisplay().html()
    sweep = NotebookDisplay()
    for event in of_a_sweep:
        sweep(event)
    assert sweep.html().count("finished after epoch 4") >= 3
    shown(Event("note", "a", {"message": "<b>"}))
    assert "&lt;b&gt;" in shown.html()
