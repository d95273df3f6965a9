"""Book-keeping at the end of an epoch: the history, the best weights so far, and whether to stop.

Two implementations with the same result: by comparisons on the device, which a CUDA graph can replay, and on the host,
which is faster if the state is there anyway (a tensor operation costs more than the arithmetic).

Shapes: T members; ``rows [T, M]`` is one row of history each: training loss, losses of the splits, metrics of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.settings.loop_settings import BOUNDED, LOWER
from weft.core.task import Task
from weft.ops.launch.backend import on_gpu, use_triton
from weft.runtime.step.outcome.best_and_history_triton import note_triton, record_triton
from weft.runtime.step.state import State

FLOAT_MAX = torch.finfo(torch.float32).max
NEVER = 1 << 40  # epochs of patience without a limit


@dataclass(frozen=True)
class Bookkeeper:
    """Writes rows into a state. ``losses``: how many leading columns must stay finite; ``watched``: the column
    of the validation ``metric`` (None: the latest epoch is the best). ``rules [T, 3]`` int64: what members may
    differ in, patience in epochs, epochs between evaluations, epochs in all; ``rules_on_host`` is the same on the host.

    A group evaluates when one of its members is due; for the others only the training loss is recorded.
    """

    losses: int
    watched: int | None
    rules: Tensor
    host_rules: tuple[tuple[int, int, int], ...]
    metric: str = "accuracy"

    @classmethod
    def of(
        cls, tasks: Sequence[Task], losses: int, watched: int | None, device: torch.device, metric: str = "accuracy"
    ) -> Bookkeeper:
        """The bookkeeper of a stack of ``tasks``."""
        host_rules = tuple((task.patience or NEVER, task.eval_every, task.epochs) for task in tasks)
        return cls(losses, watched, torch.tensor(host_rules, device=device), host_rules, metric)

    @property
    def sign(self) -> float:
        """What makes more of the watched metric better."""
        return -1.0 if self.metric in LOWER else 1.0

    @property
    def lowest(self) -> float:
        """Below every score that is defined."""
        return -1.0 if self.metric in BOUNDED else -FLOAT_MAX

    def __call__(self, state: State, rows: Tensor, steps: int) -> None:
        """Record ``rows [T, M]`` at the end of the current epoch, and count ``steps`` more steps."""
        if on_gpu(rows) or rows.is_meta:
            self.on_device(state, rows, steps)
        else:
            self.on_host(state, rows, steps)

    def loss_alone(self, state: State, losses: Tensor, steps: int) -> None:
        """Record the training losses ``[T]`` of an epoch without an evaluation, and count it."""
        if use_triton(losses):
            note_triton(state, losses, steps)
            return
        state.history[:, :, 0].index_copy_(1, state.first_epoch, losses[:, None])
        _count(state, steps)

    # ---- on the host ---------------------------------------------------------------------------------

    def on_host(self, state: State, rows: Tensor, steps: int) -> None:
        """With Python's numbers."""
        step, values = int(state.first_epoch), rows.tolist()
        wants = [evaluates_at(step, wish) for wish in self.host_rules]
        if all(wants):
            state.history[:, step] = rows
        else:
            self._write_some(state, step, rows, wants)
        standing = zip(state.end.tolist(), state.best_epoch.tolist(), state.best_score.tolist(), strict=True)
        for member, (end, best_epoch, best_score) in enumerate(standing):
            if wants[member] and step < end:
                self._judge(state, member, step, values[member], best_epoch, best_score)
        _count(state, steps)

    def _write_some(self, state: State, step: int, rows: Tensor, wants: list[bool]) -> None:
        """All training losses, and everything else of the members that are due."""
        state.history[:, step, 0] = rows[:, 0]
        for member, wants_it in enumerate(wants):
            if wants_it:
                state.history[member, step] = rows[member]

    def _judge(
        self, state: State, member: int, step: int, row: list[float], best_epoch: int, best_score: float
    ) -> None:
        healthy = all(map(math.isfinite, row[: self.losses]))
        score = math.inf if self.watched is None else self.sign * row[self.watched]
        score = self.lowest if math.isnan(score) else score  # undefined ranks below every defined one
        if healthy and (self.watched is None or score > best_score):
            best_epoch = step
            self._keep(state, member, step, score)
        if not healthy or step - best_epoch >= self.host_rules[member][0]:
            state.end[member] = step + 1

    def _keep(self, state: State, member: int, step: int, score: float) -> None:
        """The weights of ``member`` are its best so far."""
        state.best_epoch[member] = step
        if self.watched is not None:
            state.best_score[member] = score
        state.best_flat[member].copy_(state.evaluated[member])
        for name, buffer in state.buffers.items():
            state.best_buffers[name][member].copy_(buffer[member])

    # ---- on the device -------------------------------------------------------------------------------

    def on_device(self, state: State, rows: Tensor, steps: int) -> None:
        """With tensors alone."""
        if use_triton(rows) and self.metric in BOUNDED:
            better = record_triton(state, rows, self.losses, self.watched, self.rules, steps)
        else:
            better = self.compare(state, rows)
            _count(state, steps)
        torch.where(better[:, None], state.evaluated, state.best_flat, out=state.best_flat)
        for name, buffer in state.buffers.items():
            chosen = better.view(-1, *(1,) * (buffer.dim() - 1))
            torch.where(chosen, buffer, state.best_buffers[name], out=state.best_buffers[name])

    def compare(self, state: State, rows: Tensor) -> Tensor:
        """Write the rows, find the best and the end; returns which members are at their best so far, ``[T]`` bool."""
        step = state.epoch
        patience, every, epochs = self.rules.unbind(1)
        wants = ((step + 1) % every == 0) | (step + 1 == epochs)
        written = torch.where(wants[:, None], rows, torch.nan)
        written[:, 0] = rows[:, 0]
        state.history.index_copy_(1, state.first_epoch, written.unsqueeze(1))
        running = wants & (step < state.end)
        healthy = rows[:, : self.losses].isfinite().all(1)
        better = running & healthy
        if self.watched is not None:
            score = self.sign * rows[:, self.watched]
            score = torch.where(score.isnan(), self.lowest, score)
            better = better & (score > state.best_score)
            torch.where(better, score, state.best_score, out=state.best_score)
        torch.where(better, step, state.best_epoch, out=state.best_epoch)
        over = ~healthy | (step - state.best_epoch >= patience)
        torch.where(running & over, step + 1, state.end, out=state.end)
        return better


def evaluates_at(step: int, wish: tuple[int, int, int]) -> bool:
    """Whether a member is due for evaluation after epoch ``step`` (counted from 0)."""
    _, every, epochs = wish
    return (step + 1) % every == 0 or step + 1 == epochs


def _count(state: State, steps: int) -> None:
    """One epoch and ``steps`` steps more."""
    state.epoch.add_(1)
    if steps:
        state.steps.add_(steps)
