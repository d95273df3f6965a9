"""A member of a group goes on alone from the group's checkpoint, also where it was padded to a wider one."""

from __future__ import annotations

import re

import pytest

import weft
from weft.serve.workers.checkpoint_split import split_off

WIDTHS = ({"hidden": 8}, {"hidden": 16, "epochs": 260}, {"hidden": 12, "seed": 3})
MODELS = {
    "averaged weights": {"model": "gcn", "optimizer": "sgd", "momentum": 0.9, "lr": 0.05, "ema": 0.9, "epochs": 240},
    "batch norm": {"model": "sage", "norm": "batch", "epochs": 240},
    "heads": {"model": "gat", "heads": 2, "out_heads": 2, "epochs": 100},
}


def interrupted(tasks, folder):
    """Train ``tasks`` as one group, and preempt it in the middle."""
    control = weft.Control()

    def on_event(event):
        if event.kind == "progress" and (event.data.get("epoch") or 0) >= 20:
            control.preempt()

    found = weft.run(weft.Sweep.from_tasks(tasks, "group"), out=folder, control=control, on_event=on_event,
                     progress=False, device="cpu")  # fmt: skip
    assert len(found.plan) == 1
    assert {one.status for one in found} == {"preempted"}


@pytest.mark.parametrize("model", MODELS)
def test_members_of_other_widths_and_epochs_go_on_alone(tmp_path, model):
    shared = {"graph": "demo", **MODELS[model]}
    tasks = [weft.Task(name=f"m{place}", **shared | own) for place, own in enumerate(WIDTHS)]
    interrupted(tasks, tmp_path / "group")
    for task in tasks:
        assert split_off(tmp_path / "group", task.name, tmp_path / task.name)
        notes: list[str] = []
        alone = weft.run(task, out=tmp_path / task.name, resume=True, progress=False, device="cpu",
                         on_event=lambda event, notes=notes: notes.append(str(event.data.get("message"))))  # fmt: skip
        (after,) = (int(found[1]) for note in notes if (found := re.search(r"resumed after epoch (\d+)", note)))
        until = min(after + 10, task.epochs)  # rounding differs in a group, and grows
        whole = weft.run(task.with_values(epochs=until), progress=False, device="cpu")
        for name in ("train_loss", "val_loss"):
            assert alone.history[name][:until] == pytest.approx(whole.history[name], rel=5e-3, abs=1e-3)
        assert len(alone.history["train_loss"]) == task.epochs
