"""The live table: the best first, readable for few and for hundreds, whatever members are called."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

import weft
from weft.core.event import Event
from weft.engine.live_table import MOST_ROWS, LiveDisplay, LiveTable


def show(members, height=40, waiting=0, width=120):
    """What a terminal shows after one look at ``members`` (name, best score, status)."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)
    table = LiveTable(console)
    graph = {"name": "made", "nodes": 10, "edges": 20}
    start = {"tasks": len(members) + waiting, "epochs": 100, "graph": graph, "metric": "accuracy", "device": "CPU"}
    table(Event("start", "sweep", start))
    plan = {"join": "stacked", "stacks": [], "why": ["equal steps"]}
    names = [name for name, _, _ in members]
    table(Event("group", "sweep", {"group": 1, "groups": 1, "members": names, "plan": plan}))
    rows = [
        {"task": name, "status": status, "epoch": 5, "epochs": 10, "loss": 1.5, "val_accuracy": best / 2}
        | {"best_val_accuracy": best, "best_epoch": 4}
        for name, best, status in members
    ]
    data = {"done": 40, "total": 100, "epochs_per_second": 1234.5, "members": rows}
    table(Event("progress", "sweep", data))
    console.print(table._render())
    return console.file.getvalue()


def lines_of(text):
    return [line for line in text.splitlines() if "5/10" in line]


def test_few_members_are_all_there_best_first():
    text = show([(f"lr={index}", index / 100, "running") for index in range(16)])
    rows = lines_of(text)
    assert [row.split()[1] for row in rows] == [f"lr={index}" for index in reversed(range(16))]
    assert "0.1500" in rows[0]
    assert "running" in rows[0]
    assert "… and" not in text
    assert "40%" in text
    assert "40 of 100 task·epochs" in text
    assert "1,234 task·epochs/s" in text


def test_groups_do_not_repeat_the_same_reasons():
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    table = LiveTable(console)
    for number, more in ((1, "small"), (2, "large")):
        plan = {"join": "stacked", "stacks": [], "why": ["equal steps", more]}
        table(Event("group", "sweep", {"group": number, "groups": 2, "members": [more], "plan": plan, "graph": "g"}))
    text = console.file.getvalue()
    assert [text.count(words) for words in ("equal steps", "· small", "· large")] == [1, 1, 1]


def test_every_graph_has_ranks_of_its_own():
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=40, color_system=None)
    table = LiveTable(console)
    graph = {"name": "cora", "nodes": 10, "edges": 20}
    start = {"tasks": 4, "epochs": 100, "graph": graph, "metric": "accuracy", "device": "CPU"}
    table(Event("start", "sweep", {**start, "graphs": ["cora", "ppi"]}))
    plan = {"join": "stacked", "stacks": [], "why": ["equal steps"]}
    for place, (graph, metric) in enumerate([("cora", "accuracy"), ("ppi", "f1_micro")], 1):
        names = [f"{graph} lr={index}" for index in (1, 2)]
        about = {"group": place, "groups": 2, "graph": graph, "metric": metric}
        table(Event("group", "sweep", {**about, "members": names, "plan": plan}))
        rows = [
            {
                "task": name,
                "status": "running",
                "epoch": 5,
                "epochs": 10,
                f"best_val_{metric}": place / 10 + index / 100,
            }
            for index, name in enumerate(names)
        ]
        table(Event("progress", "sweep", {"done": 1, "total": 2, "epochs_per_second": 3.0, "members": rows}))
    console.print(table._render())
    text = console.file.getvalue()
    assert "4 tasks on 2 graphs" in text
    assert "group 2 of 2 on ppi: 2 tasks" in text
    assert [row.split()[:3] for row in lines_of(text)] == [
        ["1", "cora", "lr=2"], ["2", "cora", "lr=1"], ["1", "ppi", "lr=2"], ["2", "ppi", "lr=1"]
    ]  # fmt: skip
    assert "0.2100" in lines_of(text)[2]


def test_hundreds_are_the_best_and_a_line_for_the_rest():
    members = [(f"lr={index}", index / 1000, "diverged" if index < 4 else "running") for index in range(200)]
    text = show(members, waiting=50)
    assert len(lines_of(text)) == MOST_ROWS
    assert "… and 230 more: 176 running, 4 diverged, 50 waiting" in text
    small = show(members, height=12)
    assert len(lines_of(small)) == 6, "no more rows than the terminal has"


def test_long_names_and_names_that_look_like_markup():
    text = show([("[red]x[/] " + "y" * 200, 0.5, "running"), ("[/nothing]", 0.4, "pruned")], width=80)
    assert "[red]x[/] yyy" in text
    assert "[/nothing]" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_the_line_of_one_task_shows_names_that_look_like_markup():
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    graph = {"name": "[graph]", "nodes": 10, "edges": 20}
    start = {"epochs": 5, "parameters": 7, "graph": graph, "metric": "accuracy", "device": "CPU"}
    with LiveDisplay(console) as line:
        line(Event("start", "[/nothing]", start | {"plan": {"why": ["features [N, F]"]}}))
        line(Event("note", "[/nothing]", {"message": "logits [nodes, classes]"}))
    text = console.file.getvalue()
    assert "[/nothing] on [graph] (10 nodes, 20 edges)" in text
    assert "features [N, F]" in text
    assert "note logits [nodes, classes]" in text


def test_ends_and_notes():
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=30, color_system=None)
    table = LiveTable(console)
    assert "preparing" in str(table._render())
    table._metric = "accuracy"
    metrics = {"epochs_run": 7, "val_accuracy": 0.75, "best_epoch": 3}
    table(Event("end", "a", {"status": "stopped", "metrics": metrics}))
    table(Event("end", "b", {"status": "failed", "metrics": {"epochs_run": 0, "best_epoch": 0}, "message": "no"}))
    table(Event("note", "s", {"message": "[odd] note"}))
    console.print(table._render())
    text = console.file.getvalue()
    assert "note [odd] note" in text
    assert "0.7500" in text
    assert "failed" in text


@pytest.mark.parametrize("kind", ["checkpoint", "finish", "interrupted", "failed"])
def test_events_that_it_does_not_show(kind):
    console = Console(file=io.StringIO())
    LiveTable(console)(Event(kind, "s", {}))
    assert console.file.getvalue() == ""


@pytest.mark.parametrize("kind", ["paused", "resumed", "preempted"])
def test_what_a_control_does_is_said(kind):
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=40, color_system=None)
    for display in (LiveTable(console), LiveDisplay(console)):
        display(Event(kind, "t", {"epoch": 7}))
    assert console.file.getvalue().count(f"{kind} after epoch 7") == 2


LONG = "a-name-that-says-everything-about-its-settings-and-then-some-more-hidden=16-lr=0.001-seed="
GRAPH = {"name": "g", "nodes": 10, "edges": 20}
PLAN = {"stacks": [], "join": "stacked", "why": []}


def table_of(width, members):
    """A table in the middle of a sweep, and what it prints."""
    console = Console(width=width, file=io.StringIO())
    table = LiveTable(console)
    about = {"tasks": len(members), "epochs": 600, "device": "cpu", "graph": GRAPH, "metric": "accuracy"}
    table(Event("start", "s", about))
    names = [member["task"] for member in members]
    table(Event("group", "s", {"group": 1, "groups": 1, "members": names, "plan": PLAN}))
    table(Event("progress", "s", {"members": members, "done": 1, "total": 2, "epochs_per_second": 3.0}))
    return console, table


def printed(console, table):
    console.file = io.StringIO()
    console.print(table._render())
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [70, 80, 120])
def test_names_are_cut_and_numbers_never(width):
    numbers = {"epoch": 123, "epochs": 1000, "loss": 12345.6789, "val_accuracy": 0.8123}
    numbers |= {"best_val_accuracy": 0.8567, "best_epoch": 101, "status": "running"}
    lines = printed(*table_of(width, [{"task": f"{LONG}{seed}", **numbers} for seed in range(3)]))
    assert all(len(line.rstrip()) <= width for line in lines)
    for seed, line in enumerate(lines[1:4]):
        assert all(number in line for number in ("123/1000", "12345.6789", "0.8123", "0.8567", "101", "running"))
        assert "…" in line
        assert f"{seed}" in line.split("…")[1].split()[0], "what tells them apart is at the end"


def test_a_row_that_ended_shows_the_values_of_its_own_last_epoch():
    early = {"task": "a", "status": "running", "epoch": 2, "epochs": 9, "loss": 1.5, "val_accuracy": 0.1}
    console, table = table_of(120, [early])
    metrics = {"metric": "accuracy", "epochs_run": 7, "best_epoch": 6, "val_accuracy": 0.9}
    last = {"epoch": 7, "epochs": 9, "loss": 0.25, "val_accuracy": 0.875}
    table(Event("end", "a", {"status": "stopped", "metrics": metrics, "last": last}))
    row = printed(console, table)[1]
    assert all(word in row for word in ("7/9", "0.2500", "0.8750", "0.9000", "stopped"))


def test_the_end_of_a_member_has_its_last_values():
    events = []
    weft.run(weft.Sweep("demo", hidden=4, epochs=[3, 6]), device="cpu", progress=False, on_event=events.append)
    ends = [event.data for event in events if event.kind == "end"]
    assert [end["last"]["epoch"] for end in ends] == [end["metrics"]["epochs_run"] for end in ends]
    assert all("loss" in end["last"] for end in ends)


def test_the_table_can_be_drawn_while_a_line_is_printed(monkeypatch):
    """Rich's printing waits for its thread that draws: if that waited for the event, neither would ever go on."""
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=40, color_system=None)
    table, drawn = LiveTable(console), []

    def draw_beside(*_, **__):
        drawing = threading.Thread(target=table._render, daemon=True)
        drawing.start()
        drawing.join(5.0)
        drawn.append(not drawing.is_alive())

    monkeypatch.setattr(console, "print", draw_beside)
    graph = {"name": "made", "nodes": 10, "edges": 20}
    table(Event("start", "sweep", {"tasks": 2, "epochs": 9, "graph": graph, "metric": "accuracy", "device": "CPU"}))
    table(Event("note", "sweep", {"message": "hello"}))
    assert drawn == [True, True]


@pytest.mark.parametrize(("done", "end"), [(1943, "216 s left"), (15743, "64 task·epochs/s")])
@pytest.mark.parametrize("width", [80, 120])
def test_the_line_below_the_table_is_one_line(width, done, end):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=40, color_system=None)
    table = LiveTable(console)
    graph = {"name": "made", "nodes": 10, "edges": 20}
    start = {"tasks": 16, "epochs": 15743, "graph": graph, "metric": "accuracy", "device": "CPU"}
    table(Event("start", "sweep", start))
    member = {"task": "a", "epoch": 5, "epochs": 10}
    data = {"done": done, "total": 15743, "epochs_per_second": 64.0, "members": [member]}
    table(Event("progress", "sweep", data))
    console.print(table._render())
    last = console.file.getvalue().splitlines()[-1]
    assert last.rstrip().endswith(end)
    assert f"{done:,} of 15,743 task·epochs  64 task·epochs/s" in last
    assert len(last) <= width
