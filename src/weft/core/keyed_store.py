"""KeyedStore: values kept between processes, in the files of one folder, by key."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from weft.core.errors import WeftError
from weft.core.files import locked, replacing
from weft.core.startup import no_collections

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """A file of the store: its bytes, and when it was last used."""

    path: Path
    bytes: int
    last_use: float


class KeyedStore:
    """Values in ``folder``, each a JSON file (compressed if its key ends in ``.gz``).

    ``digest``: of what all values depend on, such as the code that made them; a value that was written with another
    digest counts as absent, and so does a damaged one. ``max_bytes``: beyond, the least recently used entries go.
    Every entry is written in one piece. Errors of the file system while writing are raised as OSError.
    """

    def __init__(self, folder: Path, digest: str = "", max_bytes: int | None = None) -> None:
        self.folder, self.digest, self.max_bytes = folder, digest, max_bytes

    def read(self, key: str, parse: Callable[[Any], T]) -> T | None:
        """The value under ``key`` as ``parse`` makes it of plain data, shared by all readers; None if absent."""
        path = self.folder / key
        try:
            status = path.stat()
            value: T = _parsed(path, status.st_mtime_ns, status.st_size, self.digest, parse)
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, WeftError):
            return None
        with suppress(OSError):  # a folder that is read-only
            os.utime(path, ns=(time.time_ns(), status.st_mtime_ns))
        return value

    def write(self, key: str, value: Any) -> Path:
        """Write plain data under ``key``."""
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        whole, packed = {"digest": self.digest, "value": value} if self.digest else value, key.endswith(".gz")
        # With an indent, for readers, Python writes every number by itself: a captured step took five times as long.
        data = json.dumps(whole, indent=None if packed else 1, allow_nan=False).encode() + b"\n"
        with replacing(path) as partial:
            partial.write_bytes(gzip.compress(data, 1) if packed else data)
        self._trim(path)
        return path

    def lock(self, key: str) -> AbstractContextManager[None]:
        """Hold the lock of ``key``, so that no other process changes it between reading and writing."""
        return locked(self.folder / key)

    def entries(self) -> list[Entry]:
        """All entries, the most recently used first."""
        found = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name.startswith(".") or path.is_dir():
                continue
            with suppress(OSError):  # removed meanwhile
                status = path.stat()
                found.append(Entry(path, status.st_size, status.st_atime))
        return sorted(found, key=lambda entry: entry.last_use, reverse=True)

    def remove(self, key: str) -> None:
        """Remove an entry, if it is there."""
        (self.folder / key).unlink(missing_ok=True)

    def clear(self) -> int:
        """Remove everything; returns how many bytes that were."""
        size = sum(entry.bytes for entry in self.entries())
        if self.folder.is_dir():
            shutil.rmtree(self.folder)
        return size

    def _trim(self, newest: Path) -> None:
        """Remove the least recently used entries beyond the limit except ``newest``."""
        if self.max_bytes is None:
            return
        total = 0
        for entry in self.entries():
            total += entry.bytes
            if total > self.max_bytes and entry.path != newest:
                self.remove(entry.path.name)


@lru_cache(maxsize=16)
def _parsed(path: Path, written: int, size: int, digest: str, parse: Callable[[Any], T]) -> T:
    """The value of a file; the same file is parsed once per process, which may take 0.1 s."""
    data = path.read_bytes()
    with no_collections():  # all of it stays: looking through it took half as long again
        value = json.loads(gzip.decompress(data) if path.name.endswith(".gz") else data)
        if digest:
            if value["digest"] != digest:
                raise ValueError(f"{path} was written with another digest")
            value = value["value"]
        return parse(value)


def files_digest(root: Path, endings: tuple[str, ...], *more: str) -> str:
    """A digest of the files under ``root`` by name, size and time."""
    lines = list(more)
    for folder, _, names in sorted(os.walk(root)):
        for name in sorted(name for name in names if name.endswith(endings)):
            status = os.stat(os.path.join(folder, name))
            lines.append(f"{folder}/{name} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
