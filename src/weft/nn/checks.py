"""Check arguments of layers and models: every error names the value and what was expected."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from weft.core.errors import SpecError
from weft.core.wording import did_you_mean


def check_count(name: str, value: Any) -> int:
    """A whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise SpecError(f"{name}={value!r} must be a whole number of at least 1")
    return int(value)


def check_rate(name: str, value: Any) -> float:
    """A probability below 1."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0.0 <= value < 1.0:
        raise SpecError(f"{name}={value!r} must be a number of at least 0 and below 1")
    return float(value)


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """One of ``choices``."""
    if value not in choices:
        names = ", ".join(repr(choice) for choice in choices)
        raise SpecError(f"{name}={value!r} must be one of {names}{hint(value, choices)}")
    return value


def hint(value: Any, choices: Iterable[Any]) -> str:
    """``"; did you mean ...?"`` if a choice is close to ``value``, else nothing."""
    suggestion = did_you_mean(value, choices)
    return f"; {suggestion}" if suggestion else ""
