"""Tell whether the file that a task's model is imported from has changed since it was trained."""

from __future__ import annotations

import hashlib
import importlib.util
from contextlib import suppress
from pathlib import Path

from weft.core.errors import SpecError
from weft.core.task import Task


def model_code(task: Task) -> str | None:
    """A digest of the file behind ``"file.py:Net"`` or ``"package.module:Net"``; None for other models."""
    if not isinstance(task.model, str) or task.traits is not None:
        return None
    file = _file_of(task.model.rpartition(":")[0])
    with suppress(OSError):
        return None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return None


def _file_of(place: str) -> Path | None:
    if place.endswith(".py"):
        return Path(place)
    with suppress(ImportError, ValueError, AttributeError):
        found = importlib.util.find_spec(place)
        return None if found is None or found.origin is None else Path(found.origin)
    return None


def check_same_code(task: Task, trained: str | None, place: Path) -> None:
    """Refuse a model whose file is another one by now; ``trained``: its digest then, None: not known."""
    now = model_code(task)
    if trained is not None and now is not None and now != trained:
        raise SpecError(
            f"{place}: {task.model.rpartition(':')[0]} has changed since {task.label!r} was trained; bring it back, or "
            f"give the model yourself if it is still the same: load_result(folder, model=...)"
        )
