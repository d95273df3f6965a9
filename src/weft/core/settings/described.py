"""Described: the place of a function in a task that was read from a file, which can hold its name only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.core.errors import SpecError


@dataclass(frozen=True)
class Described:
    """A function that was given as an object and is called ``<name>`` in a file; it cannot be called."""

    name: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *_: Any, **__: Any) -> Any:
        """A :class:`SpecError` that says why."""
        raise SpecError(
            f"{self.name} was given as an object, which a file cannot hold; give the task again to train it"
        )
