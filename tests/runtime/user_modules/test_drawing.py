"""Modules that draw random numbers: each of a sweep draws what it draws alone, also when it is resumed."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.runtime.user_modules.drawing_modules import DRAWING, STACKED, DepthByHost, DropEdge
from tests.runtime.user_modules.test_exact import run, tasks_of


@pytest.mark.parametrize("model", DRAWING)
def test_members_of_a_sweep_draw_what_each_draws_alone(model):
    notes = []
    collect = lambda event: notes.append(event.data["message"]) if event.kind == "note" else None  # noqa: E731
    tasks = tasks_of(model, range(3))
    for task, one in zip(tasks, run(tasks, on_event=collect), strict=True):
        alone = run(task).history["loss"]
        assert one.history["loss"] == pytest.approx(alone, rel=2e-4, abs=2e-5)
    assert any("not as one stack" in note for note in notes) == (model not in STACKED), notes


@pytest.mark.parametrize("model", [DropEdge, DepthByHost])
def test_a_sweep_that_is_resumed_draws_on(model, tmp_path):
    tasks, control = tasks_of(model, range(3), epochs=40), weft.Control()
    whole = [result.history["loss"] for result in run(tasks)]

    def leave(event):
        if event.kind == "progress" and event.data.get("epoch", 1):
            control.preempt()

    left = run(tasks, out=tmp_path, control=control, on_event=leave)
    assert {result.status for result in left} == {"preempted"}
    torch.rand(5)  # what others draw in between does not matter
    assert [result.history["loss"] for result in run(tasks, out=tmp_path, resume=True)] == whole
