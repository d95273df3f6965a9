"""Loss and metric of every split from one set of logits, as a row of numbers on the device.

Shapes: M nodes of all splits together, S splits, ``logits [..., N, C]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.batches.source import SPLITS, OnSplit, Source
from weft.core.compatibility import columns_of
from weft.core.errors import SpecError
from weft.core.settings import LOWER
from weft.core.task import Task
from weft.ops.launch.backend import next_power_of_2, on_gpu, use_triton
from weft.ops.launch.triton_lang import jit_any_size, tl, triton
from weft.runtime.step.losses import Objective, OwnMeasure, errors, first_tensor, kind_of, logits_and_extra
from weft.runtime.step.state import State

# ---- Metrics on the device: static shapes, no host round trip, higher is better unless stated.
#
# Shapes: M evaluated nodes, C classes or labels; a leading ``...`` is for tasks that share a step.
# ``logits [..., M, C]``; ``target`` is ``[M]`` int64 (one class each) or ``[M, C]`` 0/1 (many labels).

Metric = Callable[[Tensor, Tensor], Tensor]


def one_hot(target: Tensor, classes: int) -> Tensor:
    """``target`` as a bool matrix ``[M, C]``."""
    if target.dim() == 2:
        return target > 0.5
    return target[:, None] == torch.arange(classes, device=target.device)


def correct(logits: Tensor, target: Tensor) -> Tensor:
    """Correctness per node ``[..., M]`` float32: 0 or 1, or the share of its labels that are right."""
    if target.dim() == 2:
        return ((logits > 0) == (target > 0.5)).float().mean(-1)
    return (logits.argmax(-1) == target).float()


def accuracy(logits: Tensor, target: Tensor) -> Tensor:
    """The share of nodes (or, with many labels each, of node-label pairs) that are right ``[...]``."""
    return correct(logits, target).mean(-1)


def _counts(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Per class: true positives, and false positives plus false negatives ``[..., C]`` int64."""
    truth = one_hot(target, logits.shape[-1])
    if target.dim() == 2:
        guess = logits > 0
    else:
        guess = logits.argmax(-1, keepdim=True) == torch.arange(logits.shape[-1], device=logits.device)
    return (truth & guess).sum(-2), (truth ^ guess).sum(-2)


def f1_micro(logits: Tensor, target: Tensor) -> Tensor:
    """F1 of all classes pooled: ``2 TP / (2 TP + FP + FN)`` ``[...]``."""
    hits, misses = (count.sum(-1).double() for count in _counts(logits, target))
    return (2 * hits / (2 * hits + misses).clamp(min=1)).float()


def f1_macro(logits: Tensor, target: Tensor) -> Tensor:
    """The mean F1 of the classes that occur, in truth or in prediction; of many labels, of all of them ``[...]``.

    A label that neither occurs nor is predicted counts as 0, as in scikit-learn's ``f1_score(average="macro")``.
    """
    hits, misses = (count.double() for count in _counts(logits, target))
    support = 2 * hits + misses
    score = 2 * hits / support.clamp(min=1)
    if target.dim() == 2:
        return score.mean(-1).float()
    return (score.sum(-1) / (support > 0).sum(-1).clamp(min=1)).float()


def log_odds(logits: Tensor) -> Tensor:
    """``log p / (1 - p)`` of every class ``[..., M, C]``: in the order of probabilities, which tie where they saturate.

    Of two classes the difference of their logits. Float32 of float64 sums: equal for the same logits in another order.
    """
    x = logits.double()
    best = x.argmax(-1, keepdim=True)
    top, is_best = x.gather(-1, best), best == torch.arange(x.shape[-1], device=x.device)
    rest = torch.where(is_best, -math.inf, x).logsumexp(-1, keepdim=True)  # of all classes but the best
    others = top + (1 + (rest - top).exp() - (x - top).exp()).log()
    return (x - torch.where(is_best, rest, others)).float()


def roc_auc(logits: Tensor, target: Tensor) -> Tensor:
    """Mean area under the ROC curve, one label against the rest ``[...]``; NaN where none has both classes.

    The area is the chance that a positive outranks a negative (a tie counts half), from the mean rank of the
    positives. Labels with one class only are left out of the mean.
    """
    scores = (logits if target.dim() == 2 else log_odds(logits)).transpose(-1, -2).contiguous()
    positive = one_hot(target, logits.shape[-1]).transpose(-1, -2).double()
    ordered = scores.sort(-1).values
    below = torch.searchsorted(ordered, scores)
    upto = torch.searchsorted(ordered, scores, right=True)
    rank = (below + upto + 1).double() / 2
    ones = positive.sum(-1)
    pairs = ones * (positive.shape[-1] - ones)
    area = ((rank * positive).sum(-1) - ones * (ones + 1) / 2) / pairs.clamp(min=1)
    usable = (pairs > 0).double()
    return ((area * usable).sum(-1) / usable.sum(-1)).float()


def r2(output: Tensor, target: Tensor) -> Tensor:
    """The share of the targets' variance that is explained ``[...]``: of several numbers per node, the mean of theirs.

    Numbers that are equal for all nodes are left out of the mean; NaN where all of them are.
    """
    rest = errors(output, target).double().square().sum(-2)
    numbers = target.double().reshape(target.shape[0], -1)
    spread = (numbers - numbers.mean(0)).square().sum(0)
    share = torch.where(spread > 0, 1.0 - rest / spread, 0.0)
    return (share.sum(-1) / (spread > 0).sum()).float()


METRICS: dict[str, Metric] = {
    "accuracy": accuracy,
    "f1_micro": f1_micro,
    "f1_macro": f1_macro,
    "roc_auc": roc_auc,
    # Mean squared and absolute errors [...] of output [..., M, D] for numbers target [M, D], or [M] if D is 1.
    "mse": lambda output, target: errors(output, target).square().mean((-2, -1)),
    "mae": lambda output, target: errors(output, target).abs().mean((-2, -1)),
    "r2": r2,
}


# ---- Cross-entropy and correct predictions of every split in one pass over the logits, by a Triton kernel.
#
# On small graphs kernel launches dominate an epoch, and two numbers per split would take a dozen of them.
# Shapes: T members, N nodes, M nodes of all splits together, S splits, C classes.


@triton.jit
def _score_kernel(
    logits, target, rows, starts, share, smoothing, sums, C, N, BM: tl.constexpr, BC: tl.constexpr, SMOOTH: tl.constexpr
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
    if SMOOTH:  # (1 - s) (lse - chosen) + s (lse - mean)
        loss += tl.load(smoothing + member) * (chosen - tl.sum(tl.where(inside, value, 0.0), 1) / C)
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

    def __call__(self, logits: Tensor, smoothing: Tensor | None = None) -> Tensor:
        """``logits [..., N, C]`` to the mean losses of the splits, then their accuracies ``[..., 2 S]``.

        ``smoothing``: of the labels, one number per member.
        """
        logits = logits.contiguous()
        lead, (nodes, classes) = logits.shape[:-2], logits.shape[-2:]
        sums = torch.empty(*lead, 2 * self._splits, self._programs, device=logits.device)
        _score_kernel[(self._programs, self._splits, lead.numel())](
            logits, self._target, self._rows, self._starts, self._share, sums if smoothing is None else smoothing, sums,
            classes, nodes, BM=self._block_m, BC=self._block_c, SMOOTH=smoothing is not None,
        )  # fmt: skip
        return sums.sum(-1)


class Evaluation:
    """Evaluates the splits that ``source`` has; ``columns`` names the numbers of a row ``[..., 2 S]``.

    ``own_metric``: a metric of the user's own, by the name ``metric``.
    """

    def __init__(
        self,
        source: Source | OnSplit,
        objective: Objective,
        metric: str,
        classes: int,
        multilabel: bool,
        own_metric: OwnMeasure | None = None,
    ) -> None:
        listed = {name: source.rows(name) for name in SPLITS}
        self._reduce = source.reduce
        sizes = {name: self._reduce.gather(rows, 0).numel() for name, rows in listed.items()}
        self.splits = [name for name in SPLITS if sizes[name]]
        self._sizes = [sizes[name] for name in self.splits]
        self._rows = torch.cat([listed[name] for name in self.splits])
        self._own_sizes = [listed[name].numel() for name in self.splits]
        self._target = self._of_all_ranks(source.labels().index_select(0, self._rows), 0)
        self._targets = self._target.split(self._sizes)
        self.objective, self._own_metric, self._label = objective, own_metric, metric
        self._metric = METRICS["accuracy" if own_metric is not None else metric]
        # Whether loss and metric are Weft's own, and the loss of a split is a mean over its rows.
        self._plain = objective.per_row is not None and own_metric is None
        if not self._plain:
            self._labels, self._by_split = source.labels(), [listed[name] for name in self.splits]
        self._scores = None
        one_rank = self._reduce.ranks == 1
        if self._metric is accuracy and not multilabel and use_triton(self._rows) and one_rank and self._plain:
            self._scores = Scores(self._rows, self._target, self._sizes, classes)
        self.columns = columns_of(self.splits, metric)[1:]

    def _of_all_ranks(self, values: Tensor, dim: int) -> Tensor:
        """The rows of all ranks, split by split; ``values`` has those of this rank in the same order."""
        if self._reduce.ranks == 1:
            return values
        return torch.cat([self._reduce.gather(part, dim) for part in values.split(self._own_sizes, dim)], dim)

    def __call__(self, logits: Any) -> Tensor:
        """The row ``[..., 2 S]`` float32: losses of the splits, then their metrics."""
        if self._scores is not None:
            return self._scores(logits, self.objective.smoothing)
        if not self._plain:
            return self._by_calls(logits)
        chosen = self._of_all_ranks(logits.index_select(-2, self._rows).float(), -2)
        losses = self.objective.per_row(chosen, self._target)
        if self._metric is accuracy:
            # Both are means over rows: one pass for both, which counts where an epoch is all small kernels.
            values = torch.stack([losses, correct(chosen, self._target)], -2)
            means = [part.mean(-1) for part in values.split(self._sizes, -1)]
            return torch.stack(means, -1).flatten(-2)
        parts = zip(chosen.split(self._sizes, -2), self._targets, strict=True)
        means = [part.mean(-1) for part in losses.split(self._sizes, -1)]
        return torch.stack(means + [self._metric(part, target) for part, target in parts], -1)

    def _by_calls(self, output: Any) -> Tensor:
        """The row by calling objective and metric for the rows of every split."""
        measured = output if self.objective.own else logits_and_extra(output)[0]
        losses = [self.objective.loss(measured, self._labels, rows).float() for rows in self._by_split]
        if self._own_metric is not None:
            return torch.stack(losses + [self._own_metric(output, self._labels, rows) for rows in self._by_split], -1)
        logits = first_tensor(output)
        if logits is None or logits.dim() != 3:
            raise SpecError(
                f"metric={self._label!r} needs logits; the model returned {kind_of(output)}: give metric= "
                "a function of your own"
            )
        scores = [
            self._metric(logits.index_select(-2, rows).float(), self._labels.index_select(0, rows))
            for rows in self._by_split
        ]
        return torch.stack(losses + scores, -1)


# ---- Book-keeping at the end of an epoch: the history, the best weights so far, and whether to stop.
#
# Two implementations with the same result: by comparisons on the device, which a CUDA graph can replay, and on the
# host, which is faster if the state is there anyway (a tensor operation costs more than the arithmetic).
#
# Shapes: T members; ``rows [T, M]`` is one row of history each: training loss, losses of the splits, metrics of them.

LOWEST = -torch.finfo(torch.float32).max  # the score of an undefined value: below every defined one
NEVER = 1 << 40  # epochs of patience without a limit


class Bookkeeper:
    """Writes rows of ``tasks`` into a state. ``losses``: how many leading columns must stay finite, the others are of
    ``metric``; ``watched``: the column of each task that decides its best epoch (-1: the latest evaluation does).

    A group evaluates when one of its members is due; for the other members only the training loss is recorded.
    """

    def __init__(
        self, tasks: Sequence[Task], losses: int, watched: Sequence[int], device: torch.device, metric: str = "accuracy"
    ) -> None:
        self.losses, self._metric = losses, metric
        self.host_rules = [self._rule(task, column) for task, column in zip(tasks, watched, strict=True)]
        self.rules = torch.tensor(self.host_rules, dtype=torch.int64, device=device)  # [T, 5]
        self._first_slots = torch.arange(len(tasks), device=device) * (tasks[0].keep_top or 0)

    def _rule(self, task: Task, column: int) -> tuple[int, int, int, int, bool]:
        """What members may differ in: patience in epochs, epochs between evaluations, epochs in all, the column that
        decides, and whether less of it is better."""
        lower = column < self.losses or self._metric in LOWER
        return task.patience or NEVER, task.eval_every, task.epochs, column, lower

    def fill(self, row: int, task: Task, watched: int) -> None:
        """Take ``task``, for which the column ``watched`` decides, for the member in ``row``."""
        self.host_rules[row] = self._rule(task, watched)
        self.rules[row].copy_(torch.tensor(self.host_rules[row], dtype=torch.int64))

    def __call__(self, state: State, rows: Tensor, steps: int) -> None:
        """Record ``rows [T, M]`` at the end of the current epoch, and count ``steps`` more steps."""
        if "top_score" in state.extras:
            self._keep_top(state, rows)
        if on_gpu(rows) or rows.is_meta:
            self.on_device(state, rows, steps)
        else:
            self.on_host(state, rows, steps)

    def loss_alone(self, state: State, losses: Tensor, steps: int) -> None:
        """Record the training losses ``[T]`` of an epoch without an evaluation, and count it."""
        if use_triton(losses):
            note_triton(state, losses, steps)
            return
        _write(state, losses[:, None])
        _count(state, steps)

    def on_host(self, state: State, rows: Tensor, steps: int) -> None:
        """With Python's numbers."""
        done, values = state.epoch.tolist() if state.rowwise else [int(state.first_epoch)] * len(rows), rows.tolist()
        due = [evaluates_at(step, rule[1], rule[2]) for step, rule in zip(done, self.host_rules, strict=True)]
        if all(due):
            _write(state, rows)
        else:  # all training losses, and everything else of the members that are due
            _write(state, torch.where(torch.tensor(due)[:, None], rows, torch.nan))
            _write(state, rows[:, :1])
        ends, best_epochs, best_scores = state.end.tolist(), state.best_epoch.tolist(), state.best_score.tolist()
        for member, (step, row) in enumerate(zip(done, values, strict=True)):
            if not due[member] or step >= ends[member]:
                continue
            healthy = all(map(math.isfinite, row[: self.losses]))
            patience, _, _, column, lower = self.host_rules[member]
            score = -row[column] if lower else row[column]
            score = LOWEST if math.isnan(score) else score
            best_epoch = best_epochs[member]
            if healthy and (column < 0 or score > best_scores[member]):
                state.best_epoch[member] = best_epoch = step
                if column >= 0:
                    state.best_score[member] = score
                state.best_flat[member].copy_(state.evaluated[member])
                for name, buffer in state.buffers.items():
                    state.best_buffers[name][member].copy_(buffer[member])
            if not healthy or step - best_epoch >= patience:
                state.end[member] = step + 1
        _count(state, steps)

    def on_device(self, state: State, rows: Tensor, steps: int) -> None:
        """With tensors alone."""
        if use_triton(rows):
            better = record_triton(state, rows, self.losses, self.rules, steps)
        else:
            better = self.compare(state, rows)
            _count(state, steps)
        torch.where(better[:, None], state.evaluated, state.best_flat, out=state.best_flat)
        for name, buffer in state.buffers.items():
            chosen = better.view(-1, *(1,) * (buffer.dim() - 1))
            torch.where(chosen, buffer, state.best_buffers[name], out=state.best_buffers[name])

    def _wants(self, step: Tensor) -> Tensor:
        """Which members are evaluated after epoch ``step [T]``, ``[T]`` bool."""
        return ((step + 1) % self.rules[:, 1] == 0) | (step + 1 == self.rules[:, 2])

    def _healthy(self, rows: Tensor) -> Tensor:
        """Which members have finite losses, ``[T]`` bool."""
        return rows[:, : self.losses].isfinite().all(1)

    def _scores(self, rows: Tensor) -> Tensor:
        """What decides the best epoch, more is better ``[T]``."""
        value = rows.gather(1, self.rules[:, 3].clamp(min=0)[:, None]).squeeze(1)
        score = torch.where(self.rules[:, 4] > 0, -value, value)
        return torch.where(score.isnan(), LOWEST, score)

    def _keep_top(self, state: State, rows: Tensor) -> None:
        """Put this epoch in the place of a member's worst kept one, if it is better: one copy, however many are kept.

        Of equal epochs the earlier ones stay, so that they are the first of all epochs by score.
        """
        extras, score = state.extras, self._scores(rows)
        kept = extras["top_score"]
        worst = kept.amin(1)
        latest = torch.where(kept == worst[:, None], extras["top_epoch"], -2).argmax(1)  # any of those that are empty
        slots = self._first_slots + latest
        enters = self._wants(state.epoch) & (state.epoch < state.end) & self._healthy(rows) & (score > worst)
        new = {"score": score, "epoch": state.epoch, "flat": state.evaluated}
        for name, value in {**new, **{f"buffer.{name}": value for name, value in state.buffers.items()}}.items():
            copies = extras[f"top_{name}"].flatten(0, 1)
            chosen = enters.view(-1, *(1,) * (value.dim() - 1))
            copies.index_copy_(0, slots, torch.where(chosen, value, copies.index_select(0, slots)))

    def compare(self, state: State, rows: Tensor) -> Tensor:
        """Write the rows, find the best and the end; returns which members are at their best so far, ``[T]`` bool."""
        step, wants = state.epoch, self._wants(state.epoch)
        patience, column = self.rules[:, 0], self.rules[:, 3]
        written = torch.where(wants[:, None], rows, torch.nan)
        written[:, 0] = rows[:, 0]
        _write(state, written)
        running, healthy, score = wants & (step < state.end), self._healthy(rows), self._scores(rows)
        better = running & healthy & ((column < 0) | (score > state.best_score))
        torch.where(better & (column >= 0), score, state.best_score, out=state.best_score)
        torch.where(better, step, state.best_epoch, out=state.best_epoch)
        over = ~healthy | (step - state.best_epoch >= patience)
        torch.where(running & over, step + 1, state.end, out=state.end)
        return better


def evaluates_at(epoch: int, every: int, epochs: int) -> bool:
    """Whether a member is due for evaluation after ``epoch`` (counted from 0)."""
    return (epoch + 1) % every == 0 or epoch + 1 == epochs


def _write(state: State, rows: Tensor) -> None:
    """Write the first columns ``rows [T, K]`` of the epoch at hand of every member into the history."""
    history = state.history[:, :, : rows.shape[1]]
    values = rows.to(history.dtype).unsqueeze(1)  # losses of float64 parameters are float64
    if not state.rowwise:
        history.index_copy_(1, state.first_epoch, values)
        return
    last = history.shape[1] - 1
    epoch = state.epoch.view(-1, 1, 1).expand_as(values)
    at = epoch.clamp(max=last)  # what a row does after its training has ended is not written
    history.scatter_(1, at, torch.where(epoch > last, history.gather(1, at), values))


def _count(state: State, steps: int) -> None:
    """One epoch and ``steps`` steps more."""
    state.epoch.add_(1)
    if steps:
        state.steps.add_(steps)


# ---- Triton kernels of the book-keeping: an epoch in one launch instead of twenty.
#
# Shapes: T members, L epochs, M columns of history. One version of a kernel serves any number of epochs.


@jit_any_size("L")
def _record_kernel(
    rows, rules, history, clock, epochs_done, end_at, score_at, epoch_at, better_at, L, M, STEPS,
    LOSSES: tl.constexpr, LOWEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per member."""
    member = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < M
    value = tl.load(rows + member * M + column, mask=inside, other=0.0)
    step = tl.load(epochs_done + member)  # the epoch that ends here, counted from 0
    end, best_epoch = tl.load(end_at + member), tl.load(epoch_at + member)
    patience = tl.load(rules + 5 * member)
    every, epochs = tl.load(rules + 5 * member + 1), tl.load(rules + 5 * member + 2)
    watched, lower = tl.load(rules + 5 * member + 3), tl.load(rules + 5 * member + 4)
    wants = ((step + 1) % every == 0) | (step + 1 == epochs)
    kept = tl.where(wants | (column == 0), value, float("nan"))
    if step < L:  # a warm-up may go beyond
        tl.store(history + (member * L + step) * M + column, kept, mask=inside)
    unhealthy = tl.sum(tl.where((column < LOSSES) & ~(tl.abs(value) < float("inf")), 1, 0), 0)
    running = wants & (step < end)
    score = tl.sum(tl.where(column == watched, value, 0.0), 0)
    score = tl.where(lower > 0, -score, score)
    score = tl.where(score == score, score, LOWEST)
    best_score = tl.load(score_at + member)
    better = running & (unhealthy == 0) & ((watched < 0) | (score > best_score))
    tl.store(score_at + member, tl.where(better & (watched >= 0), score, best_score))
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


def record_triton(state: State, rows: Tensor, losses: int, rules: Tensor, steps: int) -> Tensor:
    """Record ``rows [T, M]`` by the ``rules [T, 5]``, count the epoch and its last ``steps``.

    Returns which members are at their best so far, ``[T]`` bool.
    """
    rows = rows.contiguous()
    members, columns = rows.shape
    better = torch.empty(members, dtype=torch.uint8, device=rows.device)
    _record_kernel[(members,)](
        rows, rules, state.history, state.clock, state.epoch, state.end, state.best_score, state.best_epoch, better,
        state.history.shape[1], columns, steps, LOSSES=losses, LOWEST=LOWEST,
        BLOCK=next_power_of_2(columns), num_warps=1,
    )  # fmt: skip
    return better.view(torch.bool)  # the same byte, without a copy


def note_triton(state: State, losses: Tensor, steps: int) -> None:
    """Record the training losses ``[T]`` alone, and count the epoch and its last ``steps``."""
    length, columns = state.history.shape[1:]
    _note_kernel[(losses.numel(),)](
        losses.contiguous(), state.history, state.clock, state.epoch, length, columns, steps, num_warps=1
    )
