"""Random numbers of initial weights that were drawn before their model is built, while another one trains.

A number depends on the seed, the place of the parameter in its model, and its place there alone, so that it is the
same whenever it is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from weft.core.lazy.made_ahead import MadeAhead

Key = tuple[int, int, tuple[int, ...]]  # seed, stream, shape
_DRAWN: ContextVar[DrawnAhead | None] = ContextVar("numbers drawn ahead", default=None)


class DrawnAhead(MadeAhead[Key, Tensor]):
    """Numbers in [0, 1) by seed, stream and shape, until a model was built with them."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(most_bytes, lambda numbers: numbers.nbytes)


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
