"""MemberSlot: what a stack keeps of one member; CannotStack: why tasks are not one stack."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft.core.task import Task
from weft.runtime.step.members.zero_padding import Padding


class CannotStack(Exception):
    """Raised for tasks that cannot be one stack, with the reason; each of them may still train by itself."""


@dataclass(frozen=True)
class MemberSlot:
    """One member of a stack: its task, how its width is padded (None: not at all), and its dropout rates."""

    task: Task
    padding: Padding | None
    rates: tuple[Tensor, ...]
