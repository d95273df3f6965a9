"""KeyedStore: values kept between processes, in the files of one folder, by key."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from weft.core.errors import WeftError
from weft.core.files import locked, replacing
from weft.core.units import show_bytes

DRAFT = ".draft-"
STALE_SECONDS = 3600.0  # a draft that old was left by a process that died
FREE_SHARE = 4  # an entry is written if the disk has this many times its bytes

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """A file or folder of the store: its bytes, and when it was last used."""

    path: Path
    bytes: int
    last_use: float


class KeyedStore:
    """Values in ``folder``, each a JSON file (compressed if its key ends in ``.gz``) or a folder of files.

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
        text = json.dumps({"digest": self.digest, "value": value} if self.digest else value, indent=1, allow_nan=False)
        data = text.encode() + b"\n"
        with replacing(path) as partial:
            partial.write_bytes(gzip.compress(data, 1) if key.endswith(".gz") else data)
        self._trim(path)
        return path

    @contextmanager
    def writing(self, key: str, size: int) -> Iterator[Path]:
        """A folder to write files of ``size`` bytes into, which becomes the entry ``key``."""
        if self.max_bytes is not None and size > self.max_bytes:
            raise OSError(f"{show_bytes(size)} are more than the {show_bytes(self.max_bytes)} for all of them")
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if FREE_SHARE * size > free:
            raise OSError(f"{self.folder} has {show_bytes(free)} free, too little for {show_bytes(size)}")
        draft = self.folder / f"{DRAFT}{secrets.token_hex(6)}"
        try:
            draft.mkdir()
            yield draft
            with suppress(OSError):  # another process was first, with the same
                os.rename(draft, self.folder / key)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        self._trim(self.folder / key)

    def lock(self, key: str) -> AbstractContextManager[None]:
        """Hold the lock of ``key``, so that no other process changes it between reading and writing."""
        return locked(self.folder / key)

    def entries(self) -> list[Entry]:
        """All entries, the most recently used first."""
        found = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name.startswith("."):
                continue
            with suppress(OSError):  # removed meanwhile
                status = [file.stat() for file in (path.rglob("*") if path.is_dir() else (path,))]
                last_use = max((file.st_atime for file in status), default=0.0)
                found.append(Entry(path, sum(file.st_size for file in status), last_use))
        return sorted(found, key=lambda entry: entry.last_use, reverse=True)

    def remove(self, key: str) -> None:
        """Remove an entry, if it is there."""
        path = self.folder / key
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def clear(self) -> int:
        """Remove everything; returns how many bytes that were."""
        size = sum(entry.bytes for entry in self.entries())
        if self.folder.is_dir():
            shutil.rmtree(self.folder)
        return size

    def _trim(self, newest: Path) -> None:
        """Remove the least recently used entries beyond the limit except ``newest``, and drafts of dead processes."""
        if self.max_bytes is None:
            return
        total = 0
        for entry in self.entries():
            total += entry.bytes
            if total > self.max_bytes and entry.path != newest:
                self.remove(entry.path.name)
        for draft in self.folder.glob(f"{DRAFT}*"):
            with suppress(OSError):
                if time.time() - draft.stat().st_mtime > STALE_SECONDS:
                    shutil.rmtree(draft, ignore_errors=True)


@lru_cache(maxsize=16)
def _parsed(path: Path, written: int, size: int, digest: str, parse: Callable[[Any], T]) -> T:
    """The value of a file; the same file is parsed once per process, which may take 0.1 s."""
    data = path.read_bytes()
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
