"""A run that was interrupted goes on to the same numbers, bit for bit, and a folder is never mixed up."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.behaviour import calls, modules
from tests.behaviour.cases import graph

EPOCHS = 400


def preempted(work, out, **options):
    """Train some epochs into ``out`` and leave."""
    control = weft.Control()

    def leave(event):
        if event.kind in ("progress", "checkpoint") and event.data.get("epoch", 1):
            control.preempt()

    return calls.run(work, out=out, control=control, on_event=leave, checkpoint_every=0.05, **options)


def assert_equal(found, expected):
    assert found.status == expected.status
    assert found.history == expected.history
    for name, value in expected.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], value), name


def task(**settings) -> weft.Task:
    return weft.Task(**{"graph": graph(), "epochs": EPOCHS, **settings})


WORK = {
    "dropout, batch norm, averaged weights": {"model": "gin", "hidden": 8, "norm": "batch", "ema": 0.9},
    "sgd with a plateau": {"model": "gat", "hidden": 8, "heads": 2, "optimizer": "sgd", "schedule": "plateau"},
    "sampled": {"model": "sage", "hidden": 8, "mode": "sampled", "fanout": (3, 2), "batch": 16, "epochs": 60},
    "a module that draws": {"model": modules.Draws},
    "a module with buffers": {"model": modules.BatchNormed},
}


@pytest.mark.parametrize("name", WORK)
def test_an_interrupted_run_ends_as_if_it_were_not(name, tmp_path):
    one = task(**WORK[name])
    left = preempted(one, tmp_path / "run")
    assert left.status == "preempted"
    assert 0 < left.metrics["epochs_run"] < one.epochs
    assert_equal(calls.run(one, out=tmp_path / "run", resume=True), calls.run(one))


def test_an_interrupted_sweep_ends_as_if_it_were_not(tmp_path):
    sweep = weft.Sweep(graph(), model=["gcn", "sage"], hidden=8, seed=range(2), epochs=EPOCHS)
    left = preempted(sweep, tmp_path / "run")
    assert "preempted" in {result.status for result in left}
    found, expected = calls.run(sweep, out=tmp_path / "run", resume=True), calls.run(sweep)
    for mine, theirs in zip(found, expected, strict=True):
        assert_equal(mine, theirs)


def test_a_folder_that_holds_a_run_is_kept_unless_it_is_to_be_overwritten(tmp_path):
    one = task(hidden=8, epochs=3)
    first = calls.run(one, out=tmp_path / "run")
    with pytest.raises(weft.SpecError, match="overwrite"):
        calls.run(one, out=tmp_path / "run")
    with pytest.raises(weft.InputError):
        calls.run(one.with_values(hidden=16), out=tmp_path / "run", resume=True)
    assert calls.read(tmp_path / "run", "result", graph=graph()).history == first.history
    other = calls.run(one.with_values(seed=9), out=tmp_path / "run", overwrite=True)
    assert calls.read(tmp_path / "run", "result", graph=graph()).history == other.history


def test_a_checkpoint_of_another_graph_is_refused(tmp_path):
    preempted(task(hidden=8), tmp_path / "run")
    with pytest.raises(weft.InputError) as caught:
        calls.run(task(hidden=8, graph=graph("regression")), out=tmp_path / "run", resume=True)
    assert "\n" not in str(caught.value)


def test_a_finished_run_is_extended_by_epochs(tmp_path):
    one = task(hidden=8, epochs=6, dropout=0.3)
    calls.run(one, out=tmp_path / "run")
    more = calls.run(one.with_values(epochs=12), out=tmp_path / "run", extend=True)
    assert more.history == calls.run(one.with_values(epochs=12)).history


def test_a_paused_run_goes_on():
    control, kinds = weft.Control(), []

    def listen(event):
        kinds.append(event.kind)
        if event.kind == "progress" and "paused" not in kinds:
            control.pause()
        if event.kind == "paused":
            control.resume()

    one = task(hidden=8)
    found = calls.run(one, control=control, on_event=listen)
    assert kinds.index("paused") < kinds.index("resumed")
    assert found.history == calls.run(one).history
