"""Triton kernel of ``evaluation.py``: cross-entropy and correct predictions of every split in one pass over the logits.

On small graphs kernel launches dominate an epoch, and two numbers per split would take a dozen of them.
Shapes: T members, N nodes, M nodes of all splits together, S splits, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.launch.backend import next_power_of_2
from weft.ops.launch.triton_lang import jit_any_size, tl, triton
from weft.runtime.step.state import State


@triton.jit
def _score_kernel(
    logits, target, rows, starts, share, sums, C, N, BM: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    split = tl.program_id(1)
    member = tl.program_id(2).to(tl.int64)
    start, stop = tl.load(starts + split), tl.load(starts + split + 1)
    m = start + tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, BC)
    listed = m < stop
    row = tl.load(rows + m, mask=listed, other=0)
    label = tl.load(target + m, mask=listed, other=0)
    inside = listed[:, None] & (c < C)[None, :]
    at = (member * N + row)[:, None] * C + c[None, :]
    value = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    top = tl.where(listed, tl.max(value, 1), 0.0)
    total = tl.sum(tl.exp(value - top[:, None]), 1)
    chosen = tl.sum(tl.where((c[None, :] == label[:, None]) & inside, value, 0.0), 1)
    loss = tl.log(tl.where(listed, total, 1.0)) + top - chosen
    # The first of equal maxima wins, as torch.argmax has it; NaN equals nothing and never hits.
    guess = tl.min(tl.where(value == top[:, None], c[None, :], BC), 1)
    hit = listed & (guess == label)
    # Losses of all splits, then hits of all splits: the order of a row of history, so that nothing is moved later.
    part = tl.load(share + split)
    splits, programs = tl.num_programs(1), tl.num_programs(0)
    into = sums + (member * 2 * splits + split) * programs + tl.program_id(0)
    tl.store(into, tl.sum(tl.where(listed, loss, 0.0), 0) * part)
    tl.store(into + splits * programs, tl.sum(hit.to(tl.float32), 0) * part)


class Scores:
    """Sums for the splits that lie one after the other in ``rows [M]`` with classes ``target [M]``."""

    def __init__(self, rows: Tensor, target: Tensor, sizes: list[int], classes: int) -> None:
        device = rows.device
        self._rows, self._target, self._splits = rows, target, len(sizes)
        self._starts = torch.tensor([0, *sizes], device=device).cumsum(0)
        self._share = 1.0 / torch.tensor(sizes, dtype=torch.float32, device=device)
        self._block_c = next_power_of_2(classes)
        self._block_m = max(1, 2048 // self._block_c)
        self._programs = -(-max(sizes) // self._block_m)

    def __call__(self, logits: Tensor) -> Tensor:
        """``logits [..., N, C]`` to the mean losses of the splits, then their accuracies ``[..., 2 S]``."""
        logits = logits.contiguous()
        lead, (nodes, classes) = logits.shape[:-2], logits.shape[-2:]
        sums = torch.empty(*lead, 2 * self._splits, self._programs, device=logits.device)
        _score_kernel[(self._programs, self._splits, lead.numel())](
            logits, self._target, self._rows, self._starts, self._share, sums, classes, nodes,
            BM=self._block_m, BC=self._block_c,
        )  # fmt: skip
        return sums.sum(-1)


# ---- Triton kernels of ``best_and_history.py``: the book-keeping of an epoch in one launch instead of twenty.
#
# Shapes: T members, L epochs, M columns of history. One version of a kernel serves any number of epochs.


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
