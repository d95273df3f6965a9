"""Check the arguments of ``weft.run`` before anything is read or written."""

from __future__ import annotations

import os
from numbers import Real
from typing import Any

from weft.core.errors import SpecError
from weft.core.task import Task
from weft.core.wording import option, switch
from weft.engine.base.cancel import Cancel
from weft.engine.base.control import Control


def check_options(*, out: Any, resume: Any, overwrite: Any, on_event: Any, checkpoint_every: Any) -> None:
    """A :class:`SpecError` for the first option that cannot be what it should be."""
    if out is not None and not isinstance(out, (str, os.PathLike)):
        raise SpecError(f"out={out!r} must be a folder, such as out='runs/first'")
    if resume and out is None:
        raise SpecError("resume=True needs out=, the folder that has the checkpoint")
    if resume and overwrite:
        what = f"{switch('resume')} continues the run in {option('out')}, {switch('overwrite')} deletes it"
        raise SpecError(f"{what}; choose one of the two")
    if on_event is not None and not callable(on_event):
        raise SpecError(f"on_event={on_event!r} must be a function that takes a weft.Event")
    if isinstance(checkpoint_every, bool) or not isinstance(checkpoint_every, Real) or not checkpoint_every >= 0:
        raise SpecError(f"checkpoint_every={checkpoint_every!r} must be a number of seconds, at least 0")


def check_handles(control: Any, cancel: Any) -> Control | None:
    """The handle that a run is given to be steered by, under whichever name; None if there is none."""
    if cancel is not None and not isinstance(cancel, Cancel):
        raise SpecError(f"cancel={cancel!r} must be a weft.Cancel()")
    if control is not None and not isinstance(control, Control):
        raise SpecError(f"control={control!r} must be a weft.Control()")
    if cancel is not None and control is not None and cancel is not control:
        raise SpecError("control= and cancel= are two handles for one run; control.cancel(...) does what cancel does")
    handle: Control | None = control if control is not None else cancel
    return handle


def check_choices(**choices: Any) -> None:
    """A :class:`SpecError` for anything but yes, no and undecided."""
    for name, choice in choices.items():
        if choice is not None and not isinstance(choice, bool):
            raise SpecError(f"{name}={choice!r} must be True, False or None, which leaves it to the plan")


def check_ranks(ranks: Any, weave: bool | None, compile: bool | None, planned: bool) -> int:
    """The number of ranks, checked against what ranks cannot do."""
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise SpecError(f"ranks={ranks!r} must be a whole number, at least 1")
    if ranks == 1:
        return 1
    if planned:
        raise SpecError(f"ranks={ranks}: a plan that was written for one device runs on one rank; give the spec itself")
    for name, choice in (("weave", weave), ("compile", compile)):
        if choice:
            raise SpecError(f"{name}=True does not go with ranks={ranks}: ranks wait for each other inside of a step")
    return ranks


def not_work(work: Any, caller: str) -> SpecError:
    """The complaint about something that is neither a task nor tasks."""
    if isinstance(work, (list, tuple)):
        wrong = [(place, item) for place, item in enumerate(work) if not isinstance(item, Task)]
        what = f"a list whose item {wrong[0][0]} is {wrong[0][1]!r}" if wrong else "an empty list"
    else:
        what = repr(work)
    return SpecError(
        f"{caller} takes a weft.Task, a weft.Sweep or a list of tasks, not {what}; weft.Task(graph=..., ...)"
    )
