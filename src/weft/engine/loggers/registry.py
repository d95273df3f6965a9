"""Loggers by their names in ``RunOptions(log=...)``."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from weft.core.errors import SpecError
from weft.core.event import Event
from weft.core.plugins import blame_plugin, load_plugin
from weft.core.run_options import LOGGERS
from weft.core.wording import option


def make_logger(spec: str) -> Callable[[Event], Any]:
    """The logger ``"KIND:WHERE"``; a :class:`SpecError` where its library is missing, or it cannot write there.

    It is called with every event. If it has ``resume(events)``, that is called before, with the journal of a run that
    is continued, and ``close()`` at the end. An entry point in ``weft.loggers`` makes one of the text behind the colon.
    """
    kind, _, where = spec.partition(":")
    if kind not in LOGGERS:
        make = load_plugin("loggers", kind)
        with blame_plugin("loggers", kind):
            made = make(where)
        if callable(made):
            return made  # type: ignore[no-any-return]
        raise SpecError(f"{option('log', spec)}: the entry point in weft.loggers made {made!r}, which is no function")
    module, _, name = LOGGERS[kind][1].partition(":")
    try:
        return getattr(import_module(f"weft.engine.loggers.{module}"), name)(where)  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        missing = f"{error.name}, which is not installed: pip install 'weft-gnn[{kind}]'"
        raise SpecError(f"{option('log', spec)} needs {missing}") from None
    except Exception as error:  # a folder that cannot be made, a server that does not answer
        said = error if isinstance(error, SpecError) else f"{type(error).__name__}: {error}"
        raise SpecError(f"{option('log', spec)}: {said}") from error
