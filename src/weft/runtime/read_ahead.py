"""Checkpoints that were read and checked before the group that goes on from them starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from weft.core.lazy.made_ahead import MadeAhead
from weft.runtime.checkpoint_data import Checkpoint

_READ: ContextVar[ReadAhead | None] = ContextVar("checkpoints read ahead", default=None)


class ReadAhead:
    """Checkpoints by their file and its state, so that one that was written anew is another.

    Beyond ``most_bytes`` the oldest are let go.
    """

    def __init__(self, most_bytes: int) -> None:
        self._read: MadeAhead[Hashable, Checkpoint] = MadeAhead(most_bytes, _bytes)

    @property
    def bytes(self) -> int:
        """Of all checkpoints that are here."""
        return self._read.bytes

    def has(self, path: Path) -> bool:
        """Whether the checkpoint in the file ``path``, as it is now, is here."""
        return self._read.has(state_of(path))

    def put(self, path: Path, read: Callable[[Path], Checkpoint]) -> None:
        """Keep what ``read`` makes of the file ``path``, unless it is here or was written anew meanwhile."""
        key = state_of(path)
        if key is None or self._read.has(key):
            return
        found = read(path)
        if key == state_of(path):
            self._read.put(key, found)

    def find(self, path: Path) -> Checkpoint | None:
        """A copy of the checkpoint that shares its tensors; None if it was not read."""
        found = self._read.find(state_of(path))
        return None if found is None else replace(found, tensors=dict(found.tensors), about=deepcopy(found.about))

    def drop_used(self) -> None:
        """Let those go that a group went on from."""
        self._read.drop_used()


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
