"""Turn exceptions of users' modules into one sentence with file and line."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from weft.core.compatibility import function_name
from weft.core.errors import ModelError, WeftError
from weft.core.task import Task
from weft.flow.failures import is_memory_error
from weft.runtime.user_modules.error_place import in_one_line, place_of

FUNCTIONS = ("objective", "metric", "optimizer")


@contextmanager
def clear_model_errors(tasks: Sequence[Task]) -> Iterator[None]:
    """Turn what a module of the user's own raises into a :class:`ModelError`.

    Errors of memory and Weft's own pass as they are. So does everything in a group of built-in models: that is a fault
    of Weft's, and its traceback is worth having.
    """
    try:
        yield
    except WeftError:
        raise
    except Exception as error:
        own = [task for task in tasks if task.traits is None or any(map(task.has_own, FUNCTIONS))]
        if not own or is_memory_error(error):
            raise
        raise ModelError(f"{_who(own)}: {what_was_raised(error, own[0])}") from error


def what_was_raised(error: Exception, task: Task) -> str:
    """The error, and where in the user's code it comes from."""
    return f"{_whose(error, task)} raised {in_one_line(error)} ({place_of(error, task.model)})"


def _whose(error: Exception, task: Task) -> str:
    """The function of the user's own that is on the way to the error, or the model."""
    called = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    for setting in FUNCTIONS:
        if task.has_own(setting) and function_name(getattr(task, setting)) in called:
            return f"{setting} {function_name(getattr(task, setting))}"
    return f"model {task.model_name}"


def _who(tasks: Sequence[Task]) -> str:
    names = [task.label for task in tasks]
    return f"task {names[0]!r}" if len(names) == 1 else f"{len(names)} tasks ({names[0]!r}, ...)"
