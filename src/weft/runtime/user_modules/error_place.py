"""Find the line of the user's code that an exception comes from, or that a module is defined at."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

_WEFT = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})


def in_one_line(error: BaseException) -> str:
    """The kind of the error and the first line of what it says."""
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0] if words else ''}"


def place_of(error: BaseException, model: Any) -> str:
    """The innermost line of the user's own; of a library that is not torch; else where the model is defined."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_file()]
    outside = [frame for frame in frames if not frame.filename.startswith((_WEFT, _TORCH))]
    own = [frame for frame in outside if not frame.filename.startswith(_INSTALLED)]
    for found in (own, outside):
        if found:
            return f"line {found[-1].lineno} of {found[-1].filename}"
    return defined_at(model) or "no line of it is on the way, as in a backward pass"


def defined_at(model: Any) -> str:
    """Where a model is defined; empty if that cannot be found."""
    if isinstance(model, str):
        return f"model {model!r}"
    thing = model if inspect.isclass(model) or inspect.isroutine(model) else type(model)
    with suppress(OSError, TypeError):
        kind = "class" if inspect.isclass(thing) else "function"
        return f"its {kind} is at line {inspect.getsourcelines(thing)[1]} of {inspect.getsourcefile(thing)}"
    return ""
