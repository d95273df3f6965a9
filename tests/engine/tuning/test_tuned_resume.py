"""A tuned run that was interrupted or killed goes on with the same trials and numbers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

import weft
from tests.graphs_for_tests import tiny_graph

SWEEP = {"lr": weft.loguniform(1e-3, 1e-1), "hidden": [4, 8], "dropout": weft.uniform(0, 0.8), "epochs": 9}


def search(out, name, every=0, sweep=None, seed=1, **run):
    """A run of 10 trials in 3 rows; a checkpoint after every decision unless ``every`` says otherwise."""
    tuner = weft.Tuner.of(name, seed=seed)
    options = weft.RunOptions(tuner=tuner, trials=10, width=3, checkpoint_every=every)
    space = weft.Sweep(tiny_graph(), **(SWEEP | (sweep or {})))
    return weft.run(space, options=options, device="cpu", out=out, progress=False, **run)


def check_same(first, second):
    assert [(one.name, one.status) for one in first] == [(one.name, one.status) for one in second]
    for one, other in zip(first, second, strict=True):
        assert str(one.history) == str(other.history)
        assert {**one.metrics, "seconds": 0, "seconds_per_epoch": 0} == {
            **other.metrics,
            "seconds": 0,
            "seconds_per_epoch": 0,
        }
        pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


def preempt_after(count, control):
    """A listener that ends a run after so many checkpoints."""
    seen = []

    def listen(event):
        if event.kind == "checkpoint":
            seen.append(event)
            if len(seen) == count:
                control.preempt()

    return listen


def kill_after(count):
    """A listener that kills the process after so many checkpoints."""
    seen = []

    def listen(event):
        seen.append(event.kind)
        if seen.count("checkpoint") == count:
            os.kill(os.getpid(), signal.SIGKILL)

    return listen


@pytest.mark.parametrize("name", ["random", "asha", "halving", "pbt"])
def test_a_preempted_run_goes_on_with_the_same_trials_and_numbers(name, tmp_path):
    whole, control = search(tmp_path / "whole", name), weft.Control()
    left = search(tmp_path / "two", name, control=control, on_event=preempt_after(2, control))
    assert "preempted" in left.statuses
    check_same(whole, search(tmp_path / "two", name, resume=True))
    check_same(whole, search(tmp_path / "two", name, resume=True))
    read = weft.read(tmp_path / "two", graph=tiny_graph())
    check_same(whole, read)


@pytest.mark.rest
def test_a_killed_run_goes_on_with_the_same_trials_and_numbers(tmp_path):
    whole = search(tmp_path / "whole", "asha")
    child = subprocess.run([sys.executable, "-m", __name__, tmp_path / "two", "3"], check=False)
    assert child.returncode == -signal.SIGKILL
    check_same(whole, search(tmp_path / "two", "asha", resume=True))


def test_another_search_is_not_resumed(tmp_path):
    control = weft.Control()
    search(tmp_path, "asha", control=control, on_event=preempt_after(1, control))
    with pytest.raises(weft.SpecError, match="was tuned with another tuner"):
        search(tmp_path, "pbt", resume=True)
    with pytest.raises(weft.SpecError, match="was tuned with another tuner"):
        search(tmp_path, "asha", resume=True, seed=2)
    with pytest.raises(weft.SpecError, match="was tuned with another sweep"):
        search(tmp_path, "asha", resume=True, sweep={"epochs": 8})
    with pytest.raises(weft.SpecError, match="holds a run already") as error:
        search(tmp_path, "asha")
    assert "extend" not in str(error.value), "which a search does not take"
    options = weft.RunOptions(tuner=weft.Tuner.of("asha", seed=1), trials=20, width=3)
    with pytest.raises(weft.SpecError, match=r"was tuned with another trials \(10\)"):
        weft.run(weft.Sweep(tiny_graph(), **SWEEP), options=options, out=tmp_path, resume=True, progress=False)
    with pytest.raises(weft.SpecError, match="holds a search; resume it with its tuner="):
        weft.run(weft.Sweep(tiny_graph(), lr=[0.1, 0.2], epochs=3), out=tmp_path, resume=True, progress=False)


def test_a_search_without_all_calls_of_its_tuner_is_not_resumed(tmp_path):
    control = weft.Control()
    search(tmp_path, "asha", control=control, on_event=preempt_after(2, control))
    calls = tmp_path / "tuner.jsonl"
    calls.write_text("".join(calls.read_text().splitlines(keepends=True)[:5]))
    with pytest.raises(weft.SpecError, match=r"tuner.jsonl: has 5 calls of the \d+ that the checkpoint counts"):
        search(tmp_path, "asha", resume=True)


def test_a_tuner_that_does_not_repeat_itself_is_not_resumed(tmp_path):
    class Fickle(weft.Tuner):
        def ask(self, n):
            return [{**settings, "lr": os.urandom(1)[0] / 1000 + 0.001} for settings in super().ask(n)]

    def train(**run):
        options = weft.RunOptions(tuner=Fickle(), trials=6, width=2, checkpoint_every=0)
        return weft.run(weft.Sweep(tiny_graph(), **SWEEP), options=options, out=tmp_path, progress=False, **run)

    control = weft.Control()
    train(control=control, on_event=preempt_after(1, control))
    with pytest.raises(weft.SpecError, match="answers otherwise than before"):
        train(resume=True)


if __name__ == "__main__":
    search(sys.argv[1], "asha", on_event=kill_after(int(sys.argv[2])))
