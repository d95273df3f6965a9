"""What a layer or a model may be given: every complaint names the value and what was expected."""

from __future__ import annotations

from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

from weft.core.errors import SpecError


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
        known = ", ".join(repr(choice) for choice in choices)
        raise SpecError(f"{name}={value!r} must be one of {known}{did_you_mean(value, choices)}")
    return value


def did_you_mean(value: Any, choices: tuple[Any, ...]) -> str:
    """``"; did you mean ...?"`` where a choice is close to ``value``, else nothing."""
    words = [choice for choice in choices if isinstance(choice, str)]
    close = get_close_matches(str(value).lower(), words, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
