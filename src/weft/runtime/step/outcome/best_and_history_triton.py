"""Triton kernels of ``best_and_history.py``: the book-keeping of an epoch in one launch instead of twenty.

Shapes: T members, L epochs, M columns of history. One version of a kernel serves any number of epochs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.launch.backend import next_power_of_2
from weft.ops.launch.triton_lang import jit_any_size, tl
from weft.runtime.step.state import State


@jit_any_size("L")
def _record_kernel(
    rows, rules, history, clock, epochs_done, end_at, score_at, epoch_at, better_at, L, M, STEPS,
    LOSSES: tl.constexpr, WATCHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per member."""
    member = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < M
    value = tl.load(rows + member * M + column, mask=inside, other=0.0)
    step = tl.load(epochs_done + member)  # the epoch that ends here, counted from 0
    end, best_epoch = tl.load(end_at + member), tl.load(epoch_at + member)
    patience = tl.load(rules + 3 * member)
    every, epochs = tl.load(rules + 3 * member + 1), tl.load(rules + 3 * member + 2)
    wants = ((step + 1) % every == 0) | (step + 1 == epochs)
    kept = tl.where(wants | (column == 0), value, float("nan"))
    if step < L:  # a warm-up may go beyond
        tl.store(history + (member * L + step) * M + column, kept, mask=inside)
    unhealthy = tl.sum(tl.where((column < LOSSES) & ~(tl.abs(value) < float("inf")), 1, 0), 0)
    running = wants & (step < end)
    better = running & (unhealthy == 0)
    if WATCHED >= 0:
        score = tl.sum(tl.where(column == WATCHED, tl.where(value == value, value, -1.0), 0.0), 0)
        best_score = tl.load(score_at + member)
        better = better & (score > best_score)
        tl.store(score_at + member, tl.where(better, score, best_score))
    best_epoch = tl.where(better, step, best_epoch)
    tl.store(epoch_at + member, best_epoch)
    over = (unhealthy > 0) | (step - best_epoch >= patience)
    tl.store(end_at + member, tl.where(running & over, step + 1, end))
    tl.store(better_at + member, better.to(tl.uint8))
    tl.store(epochs_done + member, step + 1)
    tl.store(clock + 2 * member + 1, tl.load(clock + 2 * member + 1) + STEPS)


@jit_any_size("L")
def _note_kernel(losses, history, clock, epochs_done, L, M, STEPS):
    """One program per member."""
    member = tl.program_id(0).to(tl.int64)
    epoch = tl.load(epochs_done + member)
    if epoch < L:
        tl.store(history + (member * L + epoch) * M, tl.load(losses + member))
    tl.store(epochs_done + member, epoch + 1)
    tl.store(clock + 2 * member + 1, tl.load(clock + 2 * member + 1) + STEPS)


def record_triton(state: State, rows: Tensor, losses: int, watched: int | None, rules: Tensor, steps: int) -> Tensor:
    """Record ``rows [T, M]`` by the ``rules [T, 3]``, count the epoch and its last ``steps``.

    Returns which members are at their best so far, ``[T]`` bool.
    """
    rows = rows.contiguous()
    members, columns = rows.shape
    better = torch.empty(members, dtype=torch.uint8, device=rows.device)
    _record_kernel[(members,)](
        rows, rules, state.history, state.clock, state.epoch, state.end, state.best_score, state.best_epoch, better,
        state.history.shape[1], columns, steps, LOSSES=losses, WATCHED=-1 if watched is None else watched,
        BLOCK=next_power_of_2(columns), num_warps=1,
    )  # fmt: skip
    return better.view(torch.bool)  # the same byte, without a copy


def note_triton(state: State, losses: Tensor, steps: int) -> None:
    """Record the training losses ``[T]`` alone, and count the epoch and its last ``steps``."""
    length, columns = state.history.shape[1:]
    _note_kernel[(losses.numel(),)](
        losses.contiguous(), state.history, state.clock, state.epoch, length, columns, steps, num_warps=1
    )
