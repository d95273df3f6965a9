"""Errors of a user's module in one sentence, with the line of the user's code that they come from."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from weft.core.errors import SpecError, WeftError
from weft.core.task import Task

_WEFT = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})


@contextmanager
def model_errors(task: Task, graph: str) -> Iterator[None]:
    """Inside, errors of the model of ``task`` become one sentence that names the task and the graph."""
    try:
        yield
    except (WeftError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise SpecError(
            f"task {task.label!r}: model {task.model_name} failed on graph "
            f"{graph!r}: {in_one_line(error)} ({place_of(error, task.model)})"
        ) from error


def in_one_line(error: BaseException) -> str:
    """The kind of the error and the first line of what it says."""
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0] if words else ''}"


def place_of(error: BaseException, model: Any) -> str:
    """The innermost line of the user's own; of a library that is not torch; else where the model is defined."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_file()]
    outside = [frame for frame in frames if not frame.filename.startswith((_WEFT, _TORCH))]
    own = [frame for frame in outside if is_own_file(frame.filename)]
    for found in (own, outside):
        if found:
            return f"line {found[-1].lineno} of {found[-1].filename}"
    return defined_at(model) or "no line of it is on the way, as in a backward pass"


def is_own_file(name: str) -> bool:
    """Whether a file is of the user's own code: not Weft's, nor one of Python's or of an installed library."""
    return not name.startswith((_WEFT, _TORCH, *_INSTALLED)) and Path(name).is_file()


def defined_at(model: Any) -> str:
    """Where a model is defined; empty if that cannot be found."""
    if isinstance(model, str):
        return f"model {model!r}"
    thing = model if inspect.isclass(model) or inspect.isroutine(model) else type(model)
    with suppress(OSError, TypeError):
        kind = "class" if inspect.isclass(thing) else "function"
        return f"its {kind} is at line {inspect.getsourcelines(thing)[1]} of {inspect.getsourcefile(thing)}"
    return ""
