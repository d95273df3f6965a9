"""Turn exceptions of users' modules into one sentence with file and line."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from weft.core.compatibility import function_name
from weft.core.errors import ModelError, WeftError
from weft.core.task import Task
from weft.engine.base.memory_errors import is_memory_error

FUNCTIONS = ("objective", "metric", "optimizer")
_WEFT = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})


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
    words = str(error).strip().splitlines()
    who, where = _whose(error, task), _place(error, task)
    return f"{who} raised {type(error).__name__}: {words[0] if words else ''} ({where})"


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


def _place(error: Exception, task: Task) -> str:
    """The innermost line of the user's own; of a library that is not torch; else where the model is defined."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_file()]
    outside = [frame for frame in frames if not frame.filename.startswith((_WEFT, _TORCH))]
    own = [frame for frame in outside if not frame.filename.startswith(_INSTALLED)]
    for found in (own, outside):
        if found:
            return f"line {found[-1].lineno} of {found[-1].filename}"
    return _defined(task.model)


def _defined(model: Any) -> str:
    """For errors of the backward pass, which has no line of its own."""
    if isinstance(model, str):
        return f"model {model!r}"
    thing = model if inspect.isclass(model) or inspect.isfunction(model) else type(model)
    with suppress(OSError, TypeError):
        return f"its class is at line {inspect.getsourcelines(thing)[1]} of {inspect.getsourcefile(thing)}"
    return "no line of it is on the way, as in a backward pass"
