"""What is wrong with the data of a recorded queue's file, in words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from weft.sched.interference import Interference
from weft.sched.queue_state import DeviceState, QueuedTask


def mistake_in_queue(data: Any) -> str:
    """The first mistake in what a file holds; "" if there is none."""
    if not isinstance(data, dict):
        return f"it holds {_kind(data)}, not an object"
    for name in ("tasks", "device"):
        if name not in data:
            return f"it has no {name}"
    for name in ("tasks", "actual"):
        if not isinstance(data.get(name, []), list):
            return f"{name} is {_kind(data[name])}, not a list"
    parts = [("device", data["device"], DeviceState), ("interference", data.get("interference", {}), Interference)]
    parts += [(f"{name}[{i}]", one, QueuedTask) for name in ("tasks", "actual") for i, one in _numbered(data, name)]
    found = (_mistake_in(*part) for part in parts)
    if not _is_a("float", data.get("background", 0.0)):
        return f"background is {_kind(data['background'])}, not a number"
    return next((words for words in found if words), "")


def _numbered(data: Mapping[str, Any], name: str) -> Iterable[tuple[int, Any]]:
    return enumerate(data.get(name, []))


def _mistake_in(where: str, data: Any, cls: Any) -> str:
    """Of one object: fields that it needs and has not, or that are of another kind."""
    if not isinstance(data, dict):
        return f"{where} is {_kind(data)}, not an object"
    known = {one.name: one for one in fields(cls)}
    missing = [name for name, one in known.items() if _is_needed(one) and name not in data]
    if missing:
        return f"{where} has no {' and no '.join(missing)}"
    if cls is Interference and (unknown := sorted(set(data) - set(known))):
        return f"{where} has {unknown[0]}, which is not known; known are {', '.join(known)}"
    wrong = [name for name, one in known.items() if name in data and not _is_a(str(one.type), data[name])]
    return f"{where} has {_kind(data[wrong[0]])} for {wrong[0]}" if wrong else ""


def _is_needed(one: Field[Any]) -> bool:
    return one.default is MISSING and one.default_factory is MISSING


def _is_a(kind: str, value: Any) -> bool:
    """Whether a value of JSON can stand for a field of this type."""
    if kind.endswith("| None"):
        return value is None or _is_a(kind.removesuffix("| None").strip(), value)
    if kind.startswith("tuple"):
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    if kind in ("int", "float"):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, {"str": str, "bool": bool}[kind])


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number"}
    return names[type(value)]
