"""What was decided of the stacks of a group before its first epoch, as a checkpoint holds it.

Decided anew it might be something else: how much memory is free, and how sums by atomics are rounded, differ from
process to process. A run that is resumed takes over the decisions of the first one, and so trains the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

STACKS = "stacks"  # the name in a checkpoint


@dataclass(frozen=True)
class Converted:
    """The ``layers`` of PyG in a module that compute with Weft's operators: names with kinds, none if none do.

    ``sparse``: whether features need not become dense. ``note``: what the user was told.
    """

    layers: Mapping[str, str] = field(default_factory=dict)
    sparse: bool = False
    note: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"layers": dict(self.layers), "sparse": self.sparse, "note": self.note}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Converted:
        """The inverse of :meth:`to_dict`."""
        return cls(dict(data["layers"]), bool(data["sparse"]), data["note"])


@dataclass(frozen=True)
class BuiltStack:
    """Tasks that train in one step: ``members``, their places among the tasks of the group, row by row.

    ``converted``: None if nothing was tried, as for built-in models and over ranks.
    """

    members: tuple[int, ...]
    converted: Converted | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        converted = None if self.converted is None else self.converted.to_dict()
        return {"members": list(self.members), "converted": converted}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BuiltStack:
        """The inverse of :meth:`to_dict`."""
        converted = data.get("converted")
        return cls(tuple(data["members"]), None if converted is None else Converted.from_dict(converted))


def stacks_of(about: Mapping[str, Any]) -> tuple[BuiltStack, ...]:
    """Those that a checkpoint holds; none in one that is older than they are."""
    return tuple(BuiltStack.from_dict(one) for one in about.get(STACKS, ()))


def described(stacks: Sequence[BuiltStack]) -> dict[str, Any]:
    """The inverse of :func:`stacks_of`: an entry of what a checkpoint holds."""
    return {STACKS: [one.to_dict() for one in stacks]}


def stack_of_one(about: Mapping[str, Any], member: int) -> dict[str, Any]:
    """The same entry for a member of the group that goes on alone; empty if there is none."""
    found = [BuiltStack((0,), one.converted) for one in stacks_of(about) if member in one.members]
    return described(found) if found else {}
