"""The files that an estimate depends on, and whether they are the same: a graph, and the code of a user's model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

Stamps = Mapping[str, Sequence[int]]
MOST_FILES = 200  # of a graph's folder, or of a package


def stamps_of(paths: Iterable[str]) -> dict[str, list[int]]:
    """When each file was written and how long it is; of a folder, its files as well. What is no file is left out."""
    found: dict[str, list[int]] = {}
    for path in paths:
        for one in _with_contents(Path(path)):
            stamp = _stamp(one)
            if stamp is not None:
                found[one] = stamp
    return found


def unchanged(stamps: Stamps | None) -> bool:
    """Whether all files are as they were."""
    return all(_stamp(path) == list(stamp) for path, stamp in (stamps or {}).items())


def _with_contents(path: Path) -> list[str]:
    try:
        inside = sorted(str(one) for one in path.iterdir())[:MOST_FILES] if path.is_dir() else []
    except OSError:
        inside = []
    return [str(path), *inside]


def _stamp(path: str) -> list[int] | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return [found.st_mtime_ns, found.st_size]
