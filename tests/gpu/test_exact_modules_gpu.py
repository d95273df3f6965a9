"""Users' modules on a GPU: captured or eager, alone or stacked, with the numbers of a plain loop of torch."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.runtime.user_modules import odd_modules as odd
from tests.runtime.user_modules import test_exact as cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ON_HOST = (odd.OwnList, odd.OwnArrayInDict, odd.Unregistered, odd.MaxNorm)  # make tensors on the host
DRAWING = (odd.Draws, odd.DrawsWithPython, odd.DrawsWithNumpy)
EAGER = (odd.CountsInPython, odd.CountsInDict, odd.ReadsKeptActivation, odd.DrawsWithPython)
UNTIED = (odd.TiedBuffers,)  # by torch, when a module is moved to another device
MODELS = [model for model in odd.ALL if model not in (*ON_HOST, *DRAWING, *UNTIED)]


def run(work, **options):
    notes = []

    def collect(event):
        if event.kind == "note":
            notes.append(event.data["message"])

    return weft.run(work, device="cuda", progress=False, on_event=collect, **options), notes


@pytest.mark.parametrize("model", MODELS)
def test_alone_is_a_plain_loop(model):
    (task,) = cases.tasks_of(model, [0], weight_decay=0.05)
    mine, _ = run(task)
    losses, _ = cases.plain(model, decay=0.05)
    assert mine.history["loss"] == pytest.approx(losses, rel=2e-3, abs=2e-4)


@pytest.mark.parametrize("model", MODELS)
def test_stacked_is_alone(model):
    tasks = cases.tasks_of(model, range(3))
    together, _ = run(tasks)
    for task, one in zip(tasks, together, strict=True):
        assert one.history["loss"] == pytest.approx(run(task)[0].history["loss"], rel=2e-3, abs=2e-4)


@pytest.mark.parametrize("model", [odd.Base, *EAGER])
def test_what_keeps_state_in_python_is_not_captured(model):
    _, notes = run(cases.tasks_of(model, [0])[0])
    assert any("the step runs eagerly" in note for note in notes) == (model in EAGER), notes
