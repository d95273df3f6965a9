"""Random numbers of initial weights that were drawn before their model is built, while another one trains.

A number depends on the seed, the place of the parameter in its model, and its place there alone, so that it is the
same whenever it is drawn.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

Key = tuple[int, int, tuple[int, ...]]  # seed, stream, shape
_DRAWN: ContextVar[DrawnAhead | None] = ContextVar("numbers drawn ahead", default=None)


class DrawnAhead:
    """Numbers in [0, 1) by seed, stream and shape; beyond ``most_bytes`` the oldest are let go.

    One thread fills it while another reads.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most, self._lock = most_bytes, threading.Lock()
        self._drawn: dict[Key, Tensor] = {}
        self._used: set[Key] = set()

    def has(self, key: Key) -> bool:
        """Whether such numbers are here."""
        return key in self._drawn

    def put(self, key: Key, numbers: Tensor) -> None:
        """Keep ``numbers``."""
        with self._lock:
            self._drawn[key] = numbers
            while sum(one.nbytes for one in self._drawn.values()) > self._most:
                self._drawn.pop(next(iter(self._drawn)))

    def find(self, key: Key) -> Tensor | None:
        """Such numbers, which stay here; None if they were not drawn."""
        with self._lock:
            if key in self._drawn:
                self._used.add(key)
            return self._drawn.get(key)

    def drop_used(self) -> None:
        """Let those go that a model was built with."""
        with self._lock:
            for key in self._used:
                self._drawn.pop(key, None)
            self._used.clear()


@contextmanager
def drawing_from(drawn: DrawnAhead) -> Iterator[None]:
    """Models that are built inside begin with the numbers of ``drawn``, as far as it has them."""
    token = _DRAWN.set(drawn)
    try:
        yield
    finally:
        _DRAWN.reset(token)


def drawn_before(seed: int, stream: int, shape: Sequence[int]) -> Tensor | None:
    """Numbers that were drawn ahead; None if there are none, or nothing is drawn ahead here."""
    drawn = _DRAWN.get()
    return None if drawn is None else drawn.find((seed, stream, tuple(shape)))
