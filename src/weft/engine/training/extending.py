"""Extend a run that is in a folder by seeds, settings or epochs, without repeating what is there.

The members of the former run must be among those of the new one; they keep their weights and histories, and train on if
they are to have more epochs. What a member ends with is what it would have had in one run, to the rounding of stacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.core.decision import RUNNING
from weft.core.errors import SpecError
from weft.core.task import Task
from weft.core.wording import option
from weft.runtime.checkpoint import Checkpoint

MAY_DIFFER = ("name", "epochs")


def former_members(saved: Sequence[Mapping[str, Any]], tasks: Sequence[Task], file: Path) -> list[Task]:
    """For every task of the former run the one of ``tasks`` that has its settings, maybe with more epochs."""
    described = [(task, task.to_dict()) for task in tasks]
    found = []
    for one in saved:
        task = next((task for task, now in described if same_settings(one, now)), None)
        if task is None:
            raise SpecError(
                f"{file}: {one.get('name') or one['model']!r} is not in this sweep; extending keeps what is there, so "
                f"give all settings, the former ones too, or choose another {option('out')}"
            )
        found.append(task)
    return found


def same_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether two tasks differ in their names and epochs at most; a setting that is new may be at its default."""
    return all(
        saved.get(key) == now[key] or (key not in saved and not now[key]) for key in now if key not in MAY_DIFFER
    )


def lengthened(checkpoint: Checkpoint, tasks: Sequence[Task], place: Path) -> Checkpoint:
    """The checkpoint of a group whose ``tasks`` have as many epochs as before, or more."""
    saved = checkpoint.about.get("tasks", [])
    if len(saved) != len(tasks) or all(one["epochs"] == task.epochs for one, task in zip(saved, tasks, strict=True)):
        return checkpoint
    tensors, members = dict(checkpoint.tensors), [dict(member) for member in checkpoint.about["members"]]
    length = max(task.epochs for task in tasks)
    for index, (one, task) in enumerate(zip(saved, tasks, strict=True)):
        tensors[f"{index}.history"] = _with_rows(tensors[f"{index}.history"], length)
        if task.epochs != one["epochs"] and members[index]["status"] in (RUNNING, "finished"):
            _check_more_epochs(task, one["epochs"], int(checkpoint.about["epoch"]), members[index]["status"], place)
            members[index]["status"] = RUNNING
            tensors[f"{index}.end"] = torch.full_like(tensors[f"{index}.end"], task.epochs)
    described = [{**one, "epochs": task.epochs} for one, task in zip(saved, tasks, strict=True)]
    about = {**checkpoint.about, "tasks": described, "members": members, "finished": False}
    return replace(checkpoint, tensors=tensors, about=about)


def _check_more_epochs(task: Task, before: int, trained: int, status: str, place: Path) -> None:
    """A :class:`SpecError` where a longer training would not begin as this one did."""
    start = f"{place}: task {task.label!r} cannot go from {before} to {task.epochs} epochs: "
    if task.epochs < before:
        raise SpecError(f"{start}it has trained them already; give at least {before}")
    if task.schedule != "constant":
        raise SpecError(f"{start}schedule={task.schedule!r} depends on how many there are; start afresh")
    if before % task.eval_every:
        raise SpecError(
            f"{start}it was evaluated after the last one, which eval_every={task.eval_every} would not do on the way; "
            "start afresh"
        )
    if status == "finished" and trained != before:
        raise SpecError(f"{start}its group trained {trained} and it has left the step; start afresh")


def _with_rows(history: Tensor, length: int) -> Tensor:
    """A history ``[L, M]`` with room for ``length`` epochs."""
    more = history.new_full((max(length - history.shape[0], 0), history.shape[1]), torch.nan)
    return torch.cat([history, more])
