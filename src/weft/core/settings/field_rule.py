"""Rule: check a field of a task and say what it may hold."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from weft.core.errors import SpecError


@dataclass(frozen=True)
class Rule:
    """The values a field accepts: a kind, bounds or choices, and the section of a spec file it stands in."""

    kind: type
    section: str = "train"
    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    optional: bool = False
    open: bool = False  # besides a choice, a function of the user's own, or "file.py:function"

    def check(self, label: str, name: str, value: Any) -> Any:
        """``value`` in its proper type, or a :class:`SpecError` that names it."""
        if value is None and self.optional:
            return None
        if self.open and (callable(value) or is_reference(value)):
            return value
        if isinstance(value, (list, tuple, range)):
            raise SpecError(f"task {label!r}: {name}={list(value)!r} is a list; a task has one value for each setting")
        value = self._typed(label, name, value)
        complaint = self._complaint(value)
        if complaint:
            raise SpecError(f"task {label!r}: {name}={value!r} {complaint}")
        return value

    def _typed(self, label: str, name: str, value: Any) -> Any:
        if self.kind is bool and isinstance(value, bool):
            return value
        if self.kind is str and isinstance(value, str):
            return value
        if self.kind is int and isinstance(value, Integral) and not isinstance(value, bool):
            return int(value)
        if self.kind is float and isinstance(value, Real) and not isinstance(value, bool):
            return float(value)
        raise SpecError(f"task {label!r}: {name}={value!r} must be {self.expected()}")

    def _complaint(self, value: Any) -> str:
        if self.choices:
            return "" if value in self.choices else f"must be {self.expected()}"
        if self.kind is str:
            return "" if _is_text(value) else "must be text that a file can hold"
        if self.kind is bool:
            return ""
        if not math.isfinite(value):
            return "must be a finite number"
        if self.low is not None and value < self.low:
            return f"must be at least {self.low:g}"
        if self.above is not None and value <= self.above:
            return f"must be above {self.above:g}"
        if self.high is not None and value > self.high:
            return f"must be at most {self.high:,}"
        if self.below is not None and value >= self.below:
            return f"must be below {self.below:g}"
        return ""

    def expected(self) -> str:
        """What a value should be, in words."""
        if self.choices:
            own = ', or a function ("file.py:function" in a file)' if self.open else ""
            return "one of " + ", ".join(self.choices) + own
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
        return words[self.kind] + (" (or left out)" if self.optional else "")


def _is_text(value: str) -> bool:
    """Whether a string can be written down: half a surrogate pair and a zero byte cannot be everywhere."""
    try:
        return b"\0" not in value.encode()
    except UnicodeEncodeError:
        return False


def is_reference(value: Any) -> bool:
    """Whether ``value`` says where a function is: ``"package.module:name"`` or ``"path/file.py:name"``."""
    return isinstance(value, str) and ":" in value and not value.startswith("<")


def setting(default: Any, kind: type, **limits: Any) -> Any:
    """A dataclass field with a :class:`Rule`; ``default=None`` makes it optional."""
    rule = Rule(kind, optional=default is None, **limits)
    return field(default=default, metadata={"rule": rule})


def choice(default: str | None, *choices: str, section: str = "train") -> Any:
    """A dataclass field that holds one of ``choices``."""
    return setting(default, str, choices=choices, section=section)


def open_choice(default: str, *choices: str) -> Any:
    """A dataclass field that holds one of ``choices``, or a function of the user's own."""
    return setting(default, str, choices=choices, open=True)
