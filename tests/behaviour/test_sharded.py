"""A graph over two ranks: the numbers of one rank."""

from __future__ import annotations

import pytest

import weft
from tests.behaviour import calls, modules
from tests.behaviour.cases import graph
from tests.behaviour.plain_loop import assert_same_run

TASKS = {
    "attention": {"model": "gat", "hidden": 8, "heads": 2, "norm": "batch"},
    "sampled": {"model": "sage", "hidden": 8, "mode": "sampled", "fanout": (3, 2), "batch": 14, "dropout": 0.0},
    "a module": {"model": modules.TwoBranches},
}


@pytest.mark.parametrize("name", TASKS)
def test_two_ranks_have_the_numbers_of_one(name):
    task = weft.Task(graph=graph(), epochs=5, **TASKS[name])
    assert_same_run(calls.run(task, ranks=2), calls.run(task))


def test_a_sweep_over_two_ranks_leaves_a_folder(tmp_path):
    sweep = weft.Sweep(graph(), model=["gcn", "sage"], hidden=8, epochs=4, seed=range(2))
    found = calls.run(sweep, ranks=2, out=tmp_path / "run")
    for mine, theirs in zip(found, calls.run(sweep), strict=True):
        assert_same_run(mine, theirs)
    assert {result.plan.shards for result in found} == {2}
    assert (tmp_path / "run" / "report.html").exists()


def test_a_checkpoint_of_two_ranks_is_resumed_by_one(tmp_path):
    task, control = weft.Task(graph=graph(), model="gin", hidden=8, epochs=200), weft.Control()

    def leave(event):
        if event.kind == "progress":
            control.preempt()

    assert calls.run(task, ranks=2, out=tmp_path / "run", control=control, on_event=leave).status == "preempted"
    found, expected = calls.run(task, out=tmp_path / "run", resume=True), calls.run(task)
    assert found.history["loss"] == pytest.approx(expected.history["loss"], rel=5e-3, abs=5e-3)


def test_no_ranks_are_refused():
    with pytest.raises(weft.SpecError, match="ranks=0"):
        calls.run(weft.Task(graph=graph(), hidden=8), ranks=0)
