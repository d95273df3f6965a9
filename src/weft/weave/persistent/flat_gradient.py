"""Transposed gradients go into the flat gradient at once, instead of through a contiguous copy of their own.

Shapes: T tasks, K numbers per task.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from weft.weave.copies import DIMENSIONS, _copy
from weft.weave.graph import Node
from weft.weave.member import operator_name

RESHAPED = frozenset(("view", "_unsafe_view", "reshape"))


@dataclass(frozen=True)
class Direct:
    """Nodes that need not run, and for parts of the flat gradient the node whose numbers to copy instead."""

    left_out: set[Node] = field(default_factory=set)
    source: dict[Node, Node] = field(default_factory=dict)


def direct_parts(nodes: Iterable[Node], written: set[Any]) -> Direct:
    """What ``side_by_side`` can copy from its source: copies that nothing else reads; ``written``: storages."""
    found = Direct()
    for node in nodes:
        for part in node.args[0] if operator_name(node) == "side_by_side" else ():
            chain = _chain(part)
            if chain and _fits(part, chain[-1], written):
                found.left_out.update(chain)
                found.source[part] = chain[-1].args[0]
    return found


def _chain(part: Node) -> list[Node]:
    """``part`` and the nodes before it, back to a copy, if nothing else reads any of them."""
    found = [part]
    while len(found[-1].users) == 1 and _is_reshaped(found[-1]):
        found.append(found[-1].args[0])
    return found if len(found[-1].users) == 1 and operator_name(found[-1]) == "copied" else []


def _is_reshaped(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name.partition("::")[2] in RESHAPED


def _fits(part: Node, copy: Node, written: set[Any]) -> bool:
    """Whether one launch copies it: one dimension more than ``part [T, K]`` or ``[K]``, from memory that stays."""
    given = copy.args[0]
    dimensions = len(copy.meta["shape"])
    return dimensions == len(part.meta["shape"]) + 1 <= DIMENSIONS and given.meta.get("storage") not in written


def side_by_side_direct(parts: Sequence[Tensor], tasks: int | None) -> Tensor:
    """``[T, K]`` or ``[T, A, B]`` each to ``[T, sum of K or A B]``; without ``tasks`` all lack T."""
    rows = [part if tasks is not None else part[None] for part in parts]
    rows = [part[:, None, :] if part.dim() == 2 else part for part in rows]
    widths = [part.shape[1] * part.shape[2] for part in rows]
    out = rows[0].new_empty(rows[0].shape[0], sum(widths))
    begin = 0
    for part, width in zip(rows, widths, strict=True):
        if part.numel():
            _copy(part, out[:, begin:], out.shape[1])
        begin += width
    return out if tasks is not None else out[0]
