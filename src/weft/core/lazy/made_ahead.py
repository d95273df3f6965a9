"""MadeAhead: things that were made before they are needed, up to a number of bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class MadeAhead(Generic[K, V]):
    """Things by key; beyond ``most_bytes``, as ``size_of`` counts them, the oldest are let go.

    One thread fills it while another reads.
    """

    def __init__(self, most_bytes: int, size_of: Callable[[V], int]) -> None:
        self._most, self._size_of, self._lock = most_bytes, size_of, threading.Lock()
        self._made: dict[K, V] = {}
        self._used: set[K] = set()

    @property
    def bytes(self) -> int:
        """What all that is here takes."""
        return sum(map(self._size_of, list(self._made.values())))

    def has(self, key: K) -> bool:
        """Whether such a thing is here."""
        return key in self._made

    def put(self, key: K, made: V) -> None:
        """Keep ``made``."""
        with self._lock:
            self._made[key] = made
            while self.bytes > self._most:
                self._made.pop(next(iter(self._made)))

    def find(self, key: K) -> V | None:
        """The thing, which stays here; None if it was not made."""
        with self._lock:
            if key in self._made:
                self._used.add(key)
            return self._made.get(key)

    def drop_used(self) -> None:
        """Let those go that were found."""
        with self._lock:
            for key in self._used:
                self._made.pop(key, None)
            self._used.clear()
