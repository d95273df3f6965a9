"""Checkpoints that were read and checked before the group that goes on from them starts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from weft.runtime.checkpoint_data import Checkpoint

_READ: ContextVar[ReadAhead | None] = ContextVar("checkpoints read ahead", default=None)


class ReadAhead:
    """Checkpoints by their file and its state, so that one that was written anew is another.

    Beyond ``most_bytes`` the oldest are let go. One thread fills it while another reads.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most, self._lock = most_bytes, threading.Lock()
        self._read: dict[Hashable, Checkpoint] = {}
        self._used: set[Hashable] = set()

    def has(self, path: Path) -> bool:
        """Whether the checkpoint in the file ``path``, as it is now, is here."""
        return state_of(path) in self._read

    def put(self, path: Path, read: Callable[[Path], Checkpoint]) -> None:
        """Keep what ``read`` makes of the file ``path``, unless it is here or was written anew meanwhile."""
        key = state_of(path)
        if key is None or key in self._read:
            return
        found = read(path)
        if key != state_of(path):
            return
        with self._lock:
            self._read[key] = found
            while sum(map(_bytes, self._read.values())) > self._most:
                self._read.pop(next(iter(self._read)))

    def find(self, path: Path) -> Checkpoint | None:
        """A copy of the checkpoint that shares its tensors; None if it was not read."""
        key = state_of(path)
        with self._lock:
            found = self._read.get(key)
            if found is None:
                return None
            self._used.add(key)
        return replace(found, tensors=dict(found.tensors), about=deepcopy(found.about))

    def drop_used(self) -> None:
        """Let those go that a group went on from."""
        with self._lock:
            for key in self._used:
                self._read.pop(key, None)
            self._used.clear()


def state_of(path: Path) -> Hashable:
    """What tells a file from another one that was there before; None if it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (os.path.abspath(path), found.st_ino, found.st_mtime_ns, found.st_size)


def _bytes(checkpoint: Checkpoint) -> int:
    return sum(tensor.nbytes for tensor in checkpoint.tensors.values())


@contextmanager
def reading_from(read: ReadAhead) -> Iterator[None]:
    """Checkpoints that are wanted inside are those of ``read``, as far as it has them."""
    token = _READ.set(read)
    try:
        yield
    finally:
        _READ.reset(token)


def read_before(path: Path) -> Checkpoint | None:
    """A checkpoint that was read ahead; None if it was not."""
    read = _READ.get()
    return None if read is None else read.find(path)
