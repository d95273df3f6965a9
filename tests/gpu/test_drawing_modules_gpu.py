"""Modules that draw random numbers in ``forward``, on a GPU: each of a sweep draws what it draws alone."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.runtime.user_modules.drawing_modules import DRAWING, STACKED, DepthByHost, DropEdge, DropWeight
from tests.runtime.user_modules.test_exact import tasks_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run(work, **options):
    notes = []

    def collect(event):
        if event.kind == "note":
            notes.append(event.data["message"])

    return weft.run(work, device="cuda", progress=False, on_event=collect, **options), notes


@pytest.mark.parametrize("model", DRAWING)
def test_members_of_a_sweep_draw_what_each_draws_alone(model):
    tasks = tasks_of(model, range(3))
    together, notes = run(tasks)
    for task, one in zip(tasks, together, strict=True):
        assert one.history["loss"] == pytest.approx(run(task)[0].history["loss"], rel=2e-3, abs=2e-4)
    assert any("not as one stack" in note for note in notes) == (model not in STACKED), notes


@pytest.mark.parametrize("model", [DropEdge, DropWeight, DepthByHost])
def test_a_sweep_that_is_resumed_draws_on(model, tmp_path):
    tasks, control = tasks_of(model, range(3), epochs=40), weft.Control()
    whole = [result.history["loss"] for result in run(tasks)[0]]
    first = []

    def leave(event):
        if event.kind == "checkpoint":
            first.append(event)
            control.preempt()

    weft.run(
        tasks, device="cuda", progress=False, out=tmp_path, control=control, on_event=leave,
        options=weft.RunOptions(checkpoint_every=0.0),
    )  # fmt: skip
    torch.rand(5, device="cuda")
    resumed, _ = run(tasks, out=tmp_path, resume=True)
    for one, expected in zip(resumed, whole, strict=True):
        assert one.history["loss"] == pytest.approx(expected, rel=2e-3, abs=2e-4)


def test_what_draws_on_the_host_is_not_captured():
    (task,) = tasks_of(DepthByHost, [0], epochs=40)
    result, notes = run(task)
    assert any("the step runs eagerly" in note for note in notes)
    host = weft.run(task, device="cpu", progress=False).history["loss"]
    assert result.history["loss"] == pytest.approx(host, rel=2e-3, abs=2e-4)
