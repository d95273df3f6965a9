"""Iterators of Python that say where they are: over ranges, lists and tuples, and endless ones of itertools."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

MAKERS: dict[str, Callable[..., Any]] = {
    "iter": iter,
    "count": itertools.count,
    "cycle": itertools.cycle,
    "repeat": itertools.repeat,
}
KINDS = tuple(
    map(type, (iter(range(0)), iter([]), iter(()), itertools.count(), itertools.cycle(()), itertools.repeat(0)))
)


def as_parts(iterator: Any) -> tuple[str, list[Any], Any] | None:
    """Which of :data:`MAKERS` makes an iterator, of what, and the state that it is then given; None if none does."""
    try:
        with warnings.catch_warnings():  # itertools' own are not to be asked from Python 3.14 on
            warnings.simplefilter("ignore")
            maker, parts, *rest = iterator.__reduce__()
    except TypeError:
        return None
    name = next((name for name, one in MAKERS.items() if one is maker), None)
    return None if name is None else (name, list(parts), rest[0] if rest else None)


def from_parts(maker: str, parts: list[Any], state: Any) -> Any:
    """The inverse of :func:`as_parts`."""
    made = MAKERS[maker](*parts)
    if state is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made.__setstate__(tuple(state) if isinstance(state, list) else state)
    return made
