"""Short, distinct labels for setting values (distinct unless that would make them long)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

ARGS = "model_args."  # how the names of a model's own arguments begin among settings
MAX_LONG_NUMBERS = 12  # with more numbers, short labels are better than distinct ones


def identity(value: Any) -> Any:
    """A hashable stand-in for a value of a setting: equal for equal numbers and words, one for every other object."""
    if isinstance(value, (list, tuple)):
        return tuple(identity(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((key, identity(item)) for key, item in value.items())
    if hasattr(value, "item") and not hasattr(value, "parameters") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if isinstance(value, bool):
        return ("bool", value)
    if value is None or isinstance(value, (str, int, float)):
        return value
    return str(value) if hasattr(value, "__fspath__") else ("object", id(value))


def describe(value: Any, digits: int = 3) -> str:
    """A value in few characters: numbers with ``digits`` significant ones, objects by their name."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "/".join(describe(item, digits) for item in value)
    if isinstance(value, Mapping):
        return "+".join(f"{key}:{describe(item, digits)}" for key, item in value.items())
    if isinstance(value, (str, int)):
        return str(value)
    try:
        return f"{value:.{digits}g}"
    except (TypeError, ValueError):
        return str(getattr(value, "name", None) or object_name(value, digits))


def object_name(value: Any, digits: int = 3) -> str:
    """A function or a class by its name, another object by its class; of a ``partial`` with the values it fixes."""
    if isinstance(value, partial):
        fixed = [describe(one, digits) for one in value.args]
        fixed += [f"{key}={describe(one, digits)}" for key, one in value.keywords.items()]
        return " ".join([object_name(value.func, digits), *fixed])
    return str(getattr(value, "__name__", type(value).__name__))


class Labels:
    """Words for the values of several settings: ``values`` lists what each setting takes."""

    def __init__(self, values: Mapping[str, Iterable[Any]]) -> None:
        self._words = {key: _words(list(given)) for key, given in values.items()}

    def word(self, key: str, value: Any) -> str:
        """The word for ``value`` of the setting ``key``."""
        return self._words[key][identity(value)]

    def name(self, values: Mapping[str, Any], keys: Sequence[str], first: str = "") -> str:
        """``"gcn hidden=16 lr=0.01"``: the settings ``keys`` that ``values`` has; models go without their key."""
        words = [self.word(key, values[key]) for key in keys if key in values]
        shown = [key for key in keys if key in values]
        pairs = [
            word if key in ("model", "graph") else f"{key.removeprefix(ARGS)}={word}"
            for key, word in zip(shown, words, strict=True)
        ]
        return " ".join([first, *pairs] if first else pairs)


def _words(values: Sequence[Any]) -> dict[Any, str]:
    distinct = {identity(value): value for value in values}
    if len(distinct) > MAX_LONG_NUMBERS and all(isinstance(value, float) for value in distinct.values()):
        return {key: describe(value) for key, value in distinct.items()}
    for digits in (3, 4, 6, 9, 17):
        words = {key: describe(value, digits) for key, value in distinct.items()}
        if len(set(words.values())) == len(words):
            return words
    return {key: f"{word}#{index}" for index, (key, word) in enumerate(words.items(), 1)}
