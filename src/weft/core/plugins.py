"""Plug-ins: what other distributions add to Weft by entry points, such as a logger.

    [project.entry-points."weft.loggers"]
    aim = "weft_aim:make_logger"

The groups are ``weft.loggers``, ``weft.tuners``, ``weft.models``, ``weft.readers`` and ``weft.policies``. They are
searched only for a name that Weft does not know itself, and an entry point is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from weft.core.errors import InputError, SpecError


def plugin_names(kind: str) -> tuple[str, ...]:
    """The names in the group ``weft.KIND`` (``"loggers"``, ``"models"``, ...), sorted."""
    return tuple(sorted({entry.name for entry in _entries(kind)}))


def load_plugin(kind: str, name: str) -> Any:
    """The object behind an entry point; None if there is none, a :class:`SpecError` if it cannot be imported."""
    entries = [entry for entry in _entries(kind) if entry.name == name]
    if len({entry.value for entry in entries}) > 1:
        owners = " and ".join(sorted(entry.dist.name for entry in entries))
        raise SpecError(f"{name!r} in weft.{kind} is added by {owners}; uninstall one of them")
    if not entries:
        return None
    with blame_plugin(kind, name):
        return entries[0].load()


@contextmanager
def blame_plugin(kind: str, name: str) -> Iterator[None]:
    """Turn an error raised inside into a :class:`SpecError` that names the plug-in and its distribution."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        entry = next(entry for entry in _entries(kind) if entry.name == name)
        raise SpecError(
            f"{name!r} in weft.{kind} ({entry.value} of {entry.dist.name} {entry.dist.version}) raised "
            f"{type(error).__name__}: {error}; repair or uninstall {entry.dist.name}"
        ) from error


def _entries(kind: str) -> Any:
    from importlib.metadata import entry_points  # 30 ms, which a run without plug-ins does without

    return entry_points(group=f"weft.{kind}")
