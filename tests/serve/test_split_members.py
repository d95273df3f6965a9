"""A member of a group goes on alone from the group's checkpoint, also where it was padded to a wider one."""

from __future__ import annotations

import os
import re
import signal

import pytest
import torch
from safetensors.torch import load_file

import weft
from tests.serve.serving import opened
from weft.planner.grouping.step_options import LEAVE_EVERY
from weft.serve.worker import split_off

WIDTHS = ({"hidden": 8}, {"hidden": 16, "epochs": 260}, {"hidden": 12, "seed": 3})
MODELS = {
    "averaged weights": {"model": "gcn", "optimizer": "sgd", "momentum": 0.9, "lr": 0.05, "ema": 0.9, "epochs": 240},
    "batch norm": {"model": "sage", "norm": "batch", "epochs": 240},
    "heads": {"model": "gat", "heads": 2, "out_heads": 2, "epochs": 100},
}


def interrupted(tasks, folder, after=20):
    """Train ``tasks`` as one group, and preempt it in the middle."""
    control = weft.Control()

    def on_event(event):
        if event.kind == "progress" and (event.data.get("epoch") or 0) >= after:
            control.preempt()

    found = weft.run(weft.Sweep.from_tasks(tasks, "group"), out=folder, control=control, on_event=on_event,
                     progress=False, device="cpu")  # fmt: skip
    assert len(found.plan) == 1
    return found


@pytest.mark.parametrize("model", MODELS)
def test_members_of_other_widths_and_epochs_go_on_alone(tmp_path, model):
    shared = {"graph": "demo", **MODELS[model]}
    tasks = [weft.Task(name=f"m{place}", **shared | own) for place, own in enumerate(WIDTHS)]
    assert {one.status for one in interrupted(tasks, tmp_path / "group")} == {"preempted"}
    for task in tasks:
        split_off(tmp_path / "group", task.name, tmp_path / task.name)
        notes: list[str] = []
        alone = weft.run(task, out=tmp_path / task.name, resume=True, progress=False, device="cpu",
                         on_event=lambda event, notes=notes: notes.append(str(event.data.get("message"))))  # fmt: skip
        (after,) = (int(found[1]) for note in notes if (found := re.search(r"resumed after epoch (\d+)", note)))
        until = min(after + 10, task.epochs)  # rounding differs in a group, and grows
        whole = weft.run(task.with_values(epochs=until), progress=False, device="cpu")
        for name in ("train_loss", "val_loss"):
            assert alone.history[name][:until] == pytest.approx(whole.history[name], rel=5e-3, abs=1e-3)
        assert len(alone.history["train_loss"]) == task.epochs


@pytest.mark.parametrize("leave_every", [LEAVE_EVERY, 1_000_000])  # those that ended leave the step, or stay in it
def test_members_that_had_ended_are_not_trained_again(tmp_path, monkeypatch, leave_every):
    monkeypatch.setattr("weft.engine.driver.LEAVE_EVERY", leave_every)
    own = ({"epochs": 10}, {"epochs": 5000, "patience": 3}, {"epochs": 5000, "lr": 1e20}, {"epochs": 5000})
    tasks = [weft.Task("demo", model="gcn", name=f"m{place}", seed=place, **one) for place, one in enumerate(own)]
    found = interrupted(tasks, tmp_path / "group", after=150)
    assert [one.status for one in found] == ["finished", "stopped", "diverged", "preempted"]
    group = tmp_path / "group" / "tasks"
    for task, before in zip(tasks[:3], found, strict=False):
        place, seen = tmp_path / task.name, []
        split_off(tmp_path / "group", task.name, place)
        about = {"out": place, "resume": True, "progress": False, "device": "cpu", "on_event": seen.append}
        if before.status == "diverged":
            with pytest.raises(weft.DivergedError, match=re.escape(before.message)):
                weft.run(task, **about)
        else:
            weft.run(task, **about)
        assert not [event for event in seen if event.kind == "progress"]
        after = weft.read(place)
        assert (after.status, after.metrics["best_epoch"]) == (before.status, before.metrics["best_epoch"])
        assert repr(dict(after.history)) == repr(dict(before.history))
        weights, alone = (load_file(folder / "model.safetensors") for folder in (group / task.name, place))
        assert all(torch.equal(weights[name], alone[name]) for name in weights)


def test_a_member_that_had_ended_is_done_at_once_after_its_worker_was_lost(tmp_path):
    with opened(tmp_path) as queue:
        [first] = queue.submit({"model": "sage", "epochs": 1_000_000})
        queue.until(lambda: queue.db.get(first).state == "running")
        short, long = queue.submit({"seed": 1, "epochs": 20}, {"seed": 2, "epochs": 4000})
        queue.until(lambda: {queue.db.get(name).state for name in (short, long)} == {"planned"})
        queue.db.cancel(first)
        queue.supervisor.wake()
        queue.until(lambda: queue.epoch(short) > 20)  # the group's: they were joined
        os.kill(queue.worker_pid(), signal.SIGKILL)
        [task] = queue.wait([short])
        queue.db.cancel(long)
        assert (task.state, task.attempts, task.result["status"]) == ("done", 2, "finished")
        told = [(event.kind, event.data.get("message")) for event in queue.db.events(task=short, limit=5000)]
        second = told[[place for place, one in enumerate(told) if one[0] == "running"][1] :]
        assert ("note", "resumed after epoch 20 of 20") in second
        assert "progress" not in [kind for kind, _ in second]
        assert len(queue.history(short)["val_loss"]) == 20
