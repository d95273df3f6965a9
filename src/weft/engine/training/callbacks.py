"""Call the callbacks of a member after an epoch, and collect what they ask for."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from weft.core.errors import ModelError, WeftError
from weft.core.settings.callback import Callback, Moment
from weft.core.task import Task, name_of

ByMember = Mapping[str, tuple[Callback, ...]]


def callbacks_of(tasks: Sequence[Task]) -> dict[str, tuple[Callback, ...]]:
    """The callbacks of tasks by their names, each a function; empty without any."""
    return {task.label: tuple(_found(task, one) for one in task.callbacks) for task in tasks if task.callbacks}


def _found(task: Task, callback: Callback) -> Callback:
    if not isinstance(callback.call, str):
        return callback
    from weft.runtime.user_modules.importing import import_from  # brings in torch, which a driver does without

    return replace(callback, call=import_from(task.label, "callbacks", callback.call))


def call(callbacks: Sequence[Callback], name: str, columns: Sequence[str], rows: Sequence[Sequence[float]]) -> Moment:
    """Call those of a member's callbacks that are due after the epochs ``rows``; what they asked for."""
    history = {column: [row[place] for row in rows] for place, column in enumerate(columns)}
    moment = Moment(name, len(rows), history)
    for callback in callbacks:
        if callback.is_due(moment.epoch):
            _call(callback.call, moment)
    return moment


def _call(function: Any, moment: Moment) -> None:
    try:
        function(moment)
    except WeftError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ModelError(
            f"task {moment.task!r}: callback {name_of(function)} raised {type(error).__name__}: {error} "
            f"(line {last.lineno} of {last.filename})"
        ) from error


def epochs_to_next(callbacks: Sequence[Callback], epoch: int) -> list[int]:
    """Epochs from ``epoch`` to the next call of each callback that is called again."""
    found = (callback.next_after(epoch) for callback in callbacks)
    return [after - epoch for after in found if after is not None]
