"""Cost of one operator call: floating-point operations, sequential bytes, gathered bytes, kernel launches.

A cost is computed from the shapes of one :class:`~weft.capture.observer.Call`. Weft's operators are in
``costs_weft.py``, torch's in ``costs_aten.py``; an unknown one is reported and counted as one pass over its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from weft.capture.observer import Call, Seen


@dataclass(frozen=True)
class Work:
    """The cost of a call. ``launches``: kernels, if the launcher itself was not run to count them.

    ``pieces``: workspace blocks that are held during the call.
    """

    flops: float = 0.0
    stream: float = 0.0
    gather: float = 0.0
    launches: int = 1
    pieces: tuple[int, ...] = ()

    @property
    def workspace(self) -> int:
        """Bytes of all workspace blocks."""
        return sum(self.pieces)


def tensors(tree: Any) -> Iterator[Seen]:
    """Every tensor in the arguments or results of a call."""
    if isinstance(tree, Seen):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for part in tree:
            yield from tensors(part)
    elif isinstance(tree, dict):
        yield from tensors(list(tree.values()))


def bytes_in(call: Call) -> int:
    """Bytes of all tensor arguments of the call."""
    return sum(t.bytes for t in tensors((call.args, call.kwargs)))


def bytes_out(call: Call) -> int:
    """Bytes of all results."""
    return sum(t.bytes for t in tensors(call.outs))


def elements(tree: Any) -> int:
    """Elements of all tensors in a tree."""
    return sum(t.numel for t in tensors(tree))
