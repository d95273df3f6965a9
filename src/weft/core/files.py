"""Write files atomically: a reader sees the old file or the new one, never half of it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from weft.core.event import finite

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

LONGEST_NAME = 100  # characters; file systems end at 255 bytes


@contextmanager
def replacing(path: Path, flush: bool = False) -> Iterator[Path]:
    """A path next to ``path`` to write to; on success it becomes ``path``, on an error it is removed.

    ``flush`` puts the content on the disk before the rename, for files that must survive a power cut.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        if flush:
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def file_name(name: str, otherwise: str = "task") -> str:
    """``name`` as any file system takes it: ``hidden=16_lr=0.01``; ``otherwise``, if nothing is left of it."""
    return re.sub(r"[^\w=.+-]+", "_", name, flags=re.ASCII).strip("_.")[:LONGEST_NAME] or otherwise


def write_text(path: Path, text: str, flush: bool = False) -> None:
    """Write a text file in one piece."""
    with replacing(path, flush) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, data: Mapping[str, Any], indent: int = 2, flush: bool = False) -> None:
    """Write plain data as JSON in one piece; NaN and infinity become null."""
    write_text(path, json.dumps(finite(data), indent=indent, allow_nan=False) + "\n", flush)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the lock of ``path`` and hold it, so that no other process changes the file between read and write.

    The lock is on a file next to it (``.NAME.lock``), which stays. The system releases it however a process ends.
    Without locks (Windows, some network file systems, a folder that is read only) nothing is locked.
    """
    handle = None
    with suppress(OSError):
        if fcntl is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path.with_name(f".{path.name}.lock"), os.O_CREAT | os.O_RDWR, 0o644)
            fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)
