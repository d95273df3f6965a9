"""The members of a group: where each one's state is, and what a poll reads of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor

from weft.core.task import Task
from weft.runtime.step.members.slot import MemberSlot
from weft.runtime.step.outcome.best_and_history import evaluates_at
from weft.runtime.step.parameters import Layout
from weft.runtime.step.stack import Stack
from weft.runtime.step.state import buffer_called, is_flat


@dataclass(frozen=True)
class MemberUpdate:
    """What a poll returns per member: the rows of new epochs, the end, and the best so far."""

    first: int  # epoch (from 0) of rows[0]
    rows: list[list[float]]
    end: int
    best_epoch: int
    best_score: float
    diverged: bool = False  # a loss is NaN or infinite; the member has stopped


@dataclass
class Member:
    """One task of a group: its place among the tasks, its stack, and its row there (None: dropped)."""

    index: int
    task: Task
    stack: Stack
    row: int | None
    slot: MemberSlot
    left: dict[str, Tensor] = field(default_factory=dict)  # its state on the host, once dropped

    def tensor(self, name: str) -> Tensor:
        """This member's part of the state, by the names of :meth:`weft.runtime.step.state.State.tensors`."""
        return self.left[name] if self.row is None else self.stack.state.tensors()[name][self.row]

    def saved(self, name: str) -> Tensor:
        """The same as a checkpoint has it, so that the member may also go on in another group, or alone.

        Weights and buffers at the member's true size, whatever has the parameters' places in the order of their
        elements, and the history of its own epochs.
        """
        tensor, padding = self.tensor(name), self.slot.padding
        if name == "history":
            return tensor[: self.task.epochs]
        if is_flat(name):
            return self._own_layout.in_order(tensor if padding is None else padding.narrow(tensor))
        buffer = buffer_called(name)
        return tensor if padding is None or not buffer else padding.narrow_buffer(buffer, tensor)

    def from_saved(self, name: str, tensor: Tensor) -> Tensor:
        """The inverse of :meth:`saved`; what was written as the stack has it is taken, too."""
        shape, padding = self.stack.state.tensors()[name].shape[1:], self.slot.padding
        if name == "history":
            return _longer(tensor, shape[0])
        if tensor.shape == shape or padding is None:
            return self.stack.members.layout.laid_out(tensor) if is_flat(name) else tensor
        if is_flat(name):
            return padding.widen(self._own_layout.laid_out(tensor))
        return padding.widen_buffer(buffer_called(name), tensor)

    def saved_shapes(self, name: str) -> tuple[torch.Size, ...]:
        """The shapes that :meth:`from_saved` takes."""
        shape = self.stack.state.tensors()[name].shape[1:]
        if name == "history":
            return torch.Size((self.task.epochs, *shape[1:])), shape
        padding, buffer = self.slot.padding, buffer_called(name)
        if padding is None or not (is_flat(name) or buffer):
            return (shape,)
        return torch.Size((padding.parameters,)) if is_flat(name) else padding.own_shape(buffer), shape

    @property
    def _own_layout(self) -> Layout:
        """Of the parameters at their true size."""
        layout, padding = self.stack.members.layout, self.slot.padding
        return layout if padding is None else padding.layout(layout)

    def best(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The best weights and buffers, padded as the stack has them."""
        names = self.stack.state.best_buffers
        return self.tensor("best_flat"), {name: self.tensor(f"best_buffer.{name}") for name in names}


def _longer(history: Tensor, length: int) -> Tensor:
    """``history [L, M]`` in ``length`` rows: nothing was measured in those that it lacks."""
    if history.shape[0] == length:
        return history
    found = history.new_full((length, *history.shape[1:]), torch.nan)
    found[: min(length, history.shape[0])] = history[:length]
    return found


def poll_members(members: Sequence[Member], stacks: Sequence[Stack], first: int, epoch: int) -> list[MemberUpdate]:
    """What the device has recorded of every member from epoch ``first`` up to ``epoch``; one read per stack."""
    histories = {id(stack): _StackHistory.of(stack, first, epoch) for stack in stacks}
    return [
        _StackHistory.of_left(member, first).update(0, first, member.task)
        if member.row is None
        else histories[id(member.stack)].update(member.row, first, member.task)
        for member in members
    ]


@dataclass(frozen=True)
class _StackHistory:
    """A stack's history and best scores on the host, from one poll."""

    rows: list[list[list[float]]]
    ends: list[int]
    best_epochs: list[int]
    best_scores: list[float]
    losses: int

    @classmethod
    def of(cls, stack: Stack, first: int, epoch: int) -> _StackHistory:
        state = stack.state
        rows = state.history[:, first:epoch].tolist()
        losses = sum(name.endswith("loss") for name in stack.columns)
        return cls(rows, state.end.tolist(), state.best_epoch.tolist(), state.best_score.tolist(), losses)

    @classmethod
    def of_left(cls, member: Member, first: int) -> _StackHistory:
        left = member.left
        epoch, losses = int(left["epoch"]), sum(name.endswith("loss") for name in member.stack.columns)
        rows = [left["history"][first:epoch].tolist()]
        return cls(rows, [int(left["end"])], [int(left["best_epoch"])], [float(left["best_score"])], losses)

    def update(self, row: int, first: int, task: Task) -> MemberUpdate:
        """What one member has come to; rows past its end do not count."""
        end = self.ends[row]
        rows = self.rows[row][: max(end - first, 0)]
        evaluated = evaluates_at(end - 1, (0, task.eval_every, task.epochs))  # else only the training loss was recorded
        last = rows[-1] if rows and first + len(rows) == end else []
        diverged = not all(map(isfinite, last[: self.losses if evaluated else 1]))
        return MemberUpdate(first, rows, end, self.best_epochs[row], self.best_scores[row], diverged)
