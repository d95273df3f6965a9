"""Digests of the names and shapes of a group's parameters, which tell one model from another without its weights."""

from __future__ import annotations

import hashlib

from weft.runtime.group import GroupRun


def weight_digests(run: GroupRun) -> tuple[str, ...]:
    """One digest per stack; members that are padded have the shapes of the widest."""
    layouts = [stack.members.layout for stack in run.stacks]
    shapes = [[(name, *shape) for name, shape in zip(one.names, one.shapes, strict=True)] for one in layouts]
    return tuple(hashlib.sha256(repr(one).encode()).hexdigest()[:16] for one in shapes)
