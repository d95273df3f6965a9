"""Events of kind "rows": every epoch of every member once, whatever happens to the run."""

from __future__ import annotations

import json
import math

import pytest

import weft
from tests.engine.small_sweeps import make_sweep, of_kind
from tests.graphs_for_tests import small, tiny_graph


class Killed(BaseException):
    """Raised from a listener to leave a run in the middle."""


def joined(events) -> dict[str, dict[str, list[float]]]:
    """The history of every member as its rows have it; fails where an epoch is missing or comes twice."""
    histories: dict[str, dict[str, list[float]]] = {}
    for event in events:
        assert event.data["members"], "an event without rows"
        for part in event.data["members"]:
            history = histories.setdefault(part["task"], {"epoch": [], **{name: [] for name in part["columns"]}})
            assert part["first"] == len(history["epoch"]) + 1
            assert part["rows"]
            for epoch, row in enumerate(part["rows"], part["first"]):
                history["epoch"].append(epoch)
                for name, value in zip(part["columns"], row, strict=True):
                    history[name].append(math.nan if value is None else value)
    return histories


def same(one: dict[str, list[float]], other: dict[str, list[float]]) -> bool:
    """Equal numbers, NaN where the other has NaN."""
    return list(one) == list(other) and all(
        a == b or (math.isnan(a) and math.isnan(b)) for name in one for a, b in zip(one[name], other[name], strict=True)
    )


def journal(folder) -> list[weft.Event]:
    """The events of kind "rows" in the journal of a run."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    assert not any("NaN" in line for line in lines)
    return of_kind([weft.Event.from_dict(json.loads(line)) for line in lines], "rows")


def make_task(**settings):
    return weft.Task(**{"graph": tiny_graph(), "epochs": 20, "name": "t", **small("gcn"), **settings})


def test_of_a_task_they_are_its_history(tmp_path):
    events = []
    result = weft.run(make_task(eval_every=3), out=tmp_path, progress=False, on_event=events.append)
    rows = of_kind(events, "rows")
    assert {event.task for event in rows} == {"t"}
    assert same(joined(rows)["t"], result.history)
    assert any(math.isnan(value) for value in result.history["val_loss"]), "an epoch without an evaluation"
    assert same(joined(journal(tmp_path))["t"], result.history)


def test_of_a_sweep_whose_members_end_at_their_own_time(tmp_path):
    events = []
    sweep = make_sweep(lr=[0.01, 0.1, 1e30], epochs=[5, 40], patience=8, optimizer="sgd", model=["gcn", "sage"])
    result = weft.run(sweep, out=tmp_path, progress=False, on_event=events.append)
    assert {member.status for member in result} > {"finished", "diverged"}
    histories = joined(of_kind(events, "rows"))
    assert all(same(histories[member.name], member.history) for member in result)
    seen: dict[str, int] = {}
    for event in events:
        for part in event.data["members"] if event.kind == "rows" else ():
            seen[part["task"]] = part["first"] - 1 + len(part["rows"])
        if event.kind == "end":
            assert seen[event.task] == event.data["metrics"]["epochs_run"], "rows come before the end"


@pytest.mark.parametrize("at", ["rows", "checkpoint"])
def test_a_resumed_run_sends_what_the_journal_lacks(tmp_path, at):
    sweep = make_sweep(seed=[0, 1], dropout=0.5, epochs=[6, 30])
    whole = weft.run(sweep, progress=False)

    seen = []

    def kill(event):
        # Rows are in the journal before a listener has them, and go further than the last checkpoint.
        seen.append(event.kind)
        if seen.count(at) == 2:
            raise Killed

    with pytest.raises(Killed):
        weft.run(sweep, progress=False, out=tmp_path, on_event=kill, options=weft.RunOptions(checkpoint_every=0.0))
    before, events = journal(tmp_path), []
    weft.run(sweep, progress=False, out=tmp_path, resume=True, on_event=events.append)
    for received in ([*before, *of_kind(events, "rows")], journal(tmp_path)):
        histories = joined(received)
        assert all(same(histories[member.name], member.history) for member in whole)


def test_an_extended_run_sends_the_new_epochs_and_members(tmp_path):
    weft.run(make_sweep(seed=[0, 1], epochs=6), progress=False, out=tmp_path)
    before, events = journal(tmp_path), []
    sweep = make_sweep(seed=[0, 1, 2], epochs=9)
    result = weft.run(sweep, progress=False, out=tmp_path, extend=True, on_event=events.append)
    histories = joined([*before, *of_kind(events, "rows")])
    assert all(same(histories[member.name], member.history) for member in result)


def test_a_group_that_is_tried_in_halves_sends_no_epoch_twice(tmp_path):
    """A member whose callback fails takes its group down after some epochs; the others train again from the start."""

    def fail(context):
        if context.task.startswith("seed=1"):
            raise ValueError("no")

    events = []
    sweep = make_sweep(seed=[0, 1, 2], callbacks=[weft.Callback(fail, at=[5])])
    result = weft.run(sweep, progress=False, on_event=events.append)
    assert [member.status for member in result] == ["finished", "failed", "finished"]
    histories = joined(of_kind(events, "rows"))
    for member in (result.tasks[0], result.tasks[2]):
        assert [round(x, 4) for x in histories[member.name]["loss"]] == [round(x, 4) for x in member.history["loss"]]
