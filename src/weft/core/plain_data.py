"""PlainData: dataclasses as plain data for JSON, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from types import UnionType
from typing import Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

from weft.core.errors import SpecError


class PlainData:
    """A dataclass whose fields are plain values, or tuples, mappings and dataclasses of them."""

    __slots__ = ()
    in_file: ClassVar[str] = "such data"  # what a file of it is, and what writes one

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without fields that are not compared."""
        return {name: plain(getattr(self, name)) for name in _compared(type(self))}  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`; unknown keys are ignored, so that older versions can read newer files."""
        names, readers = _readers(cls)  # type: ignore[arg-type]
        values = {name: value for name, value in data.items() if name in names}
        for name, read in readers:
            if name in values:
                values[name] = read(values[name])
        return cls(**values)

    @classmethod
    def from_json(cls, text: str, where: str) -> Self:
        """What the ``text`` of a file holds; ``where`` begins every error."""
        try:
            data = json.loads(text)
            if not isinstance(data, dict):
                raise SpecError(f"holds {type(data).__name__}, not {cls.in_file}")
            return cls.from_dict(data)
        except json.JSONDecodeError as error:
            raise SpecError(f"{where}: not valid JSON ({error}), so not {cls.in_file}") from None
        except SpecError as error:
            raise SpecError(f"{where}: {error}") from None


def plain(value: Any) -> Any:
    """``value`` with lists for tuples and dicts for dataclasses, at any depth."""
    if value is None or type(value) in (str, int, float, bool):  # most by far
        return value
    if isinstance(value, PlainData):
        return value.to_dict()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value


@cache
def _compared(cls: Any) -> tuple[str, ...]:
    """The names of the fields that are compared."""
    return tuple(row.name for row in fields(cls) if row.compare)


@cache
def _readers(cls: Any) -> tuple[frozenset[str], list[tuple[str, Callable[[Any], Any]]]]:
    """The names of all fields, and what makes the values of some of them out of plain data."""
    hints = get_type_hints(cls)
    names = frozenset(row.name for row in fields(cls))
    return names, [(name, read) for name in names if (read := _reader(hints[name])) is not None]


def _reader(hint: Any) -> Callable[[Any], Any] | None:
    """What makes a value of the type ``hint``; None if plain data is one already."""
    kind, inside = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and issubclass(hint, PlainData):
        return hint.from_dict
    read = next(filter(None, map(_reader, inside)), None)
    if kind is tuple:
        return tuple if read is None else lambda value: tuple(map(read, value))
    if read is not None and kind in (Union, UnionType):  # X | None
        return lambda value: None if value is None else read(value)
    if read is not None and kind is Mapping:
        return lambda value: {key: read(item) for key, item in value.items()}
    return None
