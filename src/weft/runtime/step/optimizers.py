"""Adam, AdamW and SGD on flat buffers, with every number in a table on the device; and torch's optimizers.

``hyper [10]`` is one row of the table: lr, beta1 (SGD: momentum), beta2, eps, weight_decay, decoupled, Adam's two bias
corrections ``1 - beta^t``, and ``1 - beta`` of both betas. The step looks its rows up by its own counter.
Shapes: T members, P parameters.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from weft import ops
from weft.core.compatibility import loop_parts
from weft.core.task import Task
from weft.runtime.loop.own_schedule import own_factors
from weft.runtime.loop.param_groups import GroupRates, adam_groups_, sgd_groups_
from weft.runtime.loop.plateau import RATE
from weft.runtime.loop.torch_update import TorchUpdate
from weft.runtime.loop.updates import Accumulation, Averaging, Clipping, is_update, update_counts
from weft.runtime.step.parameters import Layout
from weft.runtime.step.schedules import learning_rates, rate_factors

SPARE = 4  # rows beyond the last step, for the warm-up of a capture that begins there
NUMBERS = 10  # of a row
NOTHING: dict[str, Tensor] = {}


def hyper_table(task: Task, steps_per_epoch: int = 1) -> Tensor:
    """The numbers of every step ``[epochs * steps_per_epoch, 10]``, computed in double precision."""
    beta1, beta2 = task.betas
    if task.optimizer == "sgd":
        beta1, beta2 = task.momentum, 0.0
    rates = array("d", learning_rates(task, steps_per_epoch))
    fixed = [beta1, beta2, task.eps, task.weight_decay, 1.0 if task.optimizer == "adamw" else 0.0]
    counts = torch.frombuffer(array("q", update_counts(task, steps_per_epoch)), dtype=torch.int64)
    # Column by column: a tensor of rows takes seconds for the steps of a long sampled run.
    table = torch.empty(len(rates), NUMBERS, dtype=torch.float32)
    table[:, 0] = torch.frombuffer(rates, dtype=torch.float64)
    table[:, 1:6] = torch.tensor(fixed, dtype=torch.float64)
    table[:, 6], table[:, 7] = (bias_corrections(beta, counts) for beta in (beta1, beta2))
    table[:, 8:] = torch.tensor([1 - beta1, 1 - beta2], dtype=torch.float64)
    return table


def bias_corrections(beta: float, counts: Tensor) -> Tensor:
    """``1 - beta^t`` for ``counts [S]`` of at least 1 each; no power is taken beyond the first t where it is 1."""
    known = array("d")
    for count in range(1, int(counts[-1]) + 1):
        known.append(1 - beta**count)
        if known[-1] == 1.0:
            break
    known = known or array("d", [1 - beta])
    return torch.frombuffer(known, dtype=torch.float64)[counts.clamp(1, len(known)) - 1]


def sgd_(param: Tensor, grad: Tensor, velocity: Tensor, hyper: Tensor, decay_mask: Tensor | None = None) -> None:
    """One SGD step in place on ``[..., P]``: ``v = momentum v + g + decay w``, ``w -= lr v``."""
    lr, momentum, decay = (hyper[..., column, None] for column in (0, 1, 4))
    if decay_mask is not None:
        decay = decay * decay_mask
    velocity.mul_(momentum).add_(grad).addcmul_(param, decay)
    param.sub_(velocity * lr)


def stacked_table(tasks: Sequence[Task], length: int, steps_per_epoch: int, device: torch.device) -> Tensor:
    """The tables of ``tasks`` side by side ``[T, length * steps_per_epoch + SPARE, 10]``; ``length`` counts epochs.

    A member whose epochs are over has a rate of 0 (and corrections of 1, to divide by): its weights stay.
    """
    if device.type == "meta":  # a plan, which needs its size alone
        for task in tasks:
            if task.has_own("schedule"):
                own_factors(task)  # it may be wrong
        return torch.empty(len(tasks), length * steps_per_epoch + SPARE, NUMBERS, device=device)
    still = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    table = still.expand(len(tasks), length * steps_per_epoch + SPARE, still.numel()).clone()
    for row, task in zip(table, tasks, strict=True):
        row[: task.epochs * steps_per_epoch] = hyper_table(task, steps_per_epoch)
    return table.to(device)


class Optimizer:
    """The update of the flat buffers of T members in one call; all of them SGD, or all Adam or AdamW.

    What else a training loop does with gradients and weights (:mod:`weft.runtime.loop.updates`) is here where the
    tasks have it: all of a stack, or none.
    """

    def __init__(
        self, tasks: Sequence[Task], layout: Layout, length: int, device: torch.device, steps_per_epoch: int = 1
    ) -> None:
        self._sgd = tasks[0].optimizer == "sgd"
        self.moments = 1 if self._sgd else 2
        self._table = stacked_table(tasks, length, steps_per_epoch, device)
        mask = layout.decay_mask() if any(task.weight_decay or task.param_groups for task in tasks) else None
        self._mask = None if mask is None else mask.to(device)
        self._around = Around(tasks, length, steps_per_epoch, device)
        grouped = "param_groups" in loop_parts(tasks[0])
        rates = GroupRates.of(tasks, layout.names, layout.sizes, mask) if grouped else None
        self._groups = None if rates is None else rates.to(device)

    def update(
        self,
        flat: Tensor,
        grad: Tensor,
        moments: tuple[Tensor, ...],
        step: Tensor,
        extras: Mapping[str, Tensor] = NOTHING,
    ) -> None:
        """Apply ``grad [T, P]`` to ``flat [T, P]`` in place; ``step [1]`` int64 picks the rows of the table.

        ``extras``: what the state has besides (:class:`weft.runtime.step.state.State`).
        """
        hyper, row = self._table, step  # Adam's kernel looks its rows up by itself
        if self._sgd or self._groups is not None or RATE in extras:
            hyper, row = self._table.index_select(1, step).squeeze(1), None
        if RATE in extras:
            hyper[:, 0] *= extras[RATE].float()
        self._around(flat, grad, moments, step, extras, lambda *changed: self._apply(*changed, hyper, row))

    def _apply(self, flat: Tensor, grad: Tensor, moments: Sequence[Tensor], hyper: Tensor, row: Tensor | None) -> None:
        if self._groups is not None:
            grouped = sgd_groups_ if self._sgd else adam_groups_
            grouped(flat, grad, *moments, hyper, self._groups)
        elif self._sgd:
            sgd_(flat, grad, *moments, hyper, self._mask)
        else:
            ops.adam_(flat, grad, *moments, hyper, self._mask, row)


Apply = Callable[[Tensor, Tensor, Sequence[Tensor]], None]


class Around:
    """What a loop does around an update: add up gradients, clip them, average the weights after it."""

    def __init__(self, tasks: Sequence[Task], length: int, steps_per_epoch: int, device: torch.device) -> None:
        parts, about = loop_parts(tasks[0]), (length, steps_per_epoch, SPARE, device)
        self._accumulation = Accumulation(tasks, *about) if "accumulate" in parts else None
        self._clipping = Clipping(tasks, device) if "clip_norm" in parts or "clip_value" in parts else None
        self._averaging = Averaging(tasks, *about) if "ema" in parts else None

    def __call__(
        self,
        flat: Tensor,
        grad: Tensor,
        moments: Sequence[Tensor],
        step: Tensor,
        extras: Mapping[str, Tensor],
        apply: Apply,
    ) -> None:
        """Call ``apply(flat, grad, moments)`` with the gradient as it is to be; members between updates keep theirs."""
        if self._accumulation is None:
            apply(flat, self.clipped(grad), moments)
        else:
            sums, due = extras["gradient"], self._accumulation.due(step)
            grad, before = self._accumulation.add(sums, grad), [one.clone() for one in (flat, *moments)]
            apply(flat, self.clipped(grad), moments)
            for now, old in zip((flat, *moments), before, strict=True):
                now.copy_(torch.where(due, now, old))
            sums.copy_(torch.where(due, 0.0, sums))
        self.average(flat, step, extras)

    def clipped(self, grad: Tensor) -> Tensor:
        """The gradient within its bounds."""
        return grad if self._clipping is None else self._clipping(grad)

    def average(self, flat: Tensor, step: Tensor, extras: Mapping[str, Tensor]) -> None:
        """Take new weights into their average."""
        if self._averaging is not None:
            self._averaging(extras["ema"], flat, step)


class OwnOptimizer:
    """The update of one task's flat buffer by an optimizer of torch's; it keeps its moments by itself."""

    moments = 0

    def __init__(self, task: Task, layout: Layout, model: nn.Module, flat: Tensor, steps_per_epoch: int = 1) -> None:
        self._task, self._layout, self._steps = task, layout, steps_per_epoch
        self.torch = TorchUpdate(task, model, layout.named(flat.detach()[0]))
        self._factors = rate_factors(task, steps_per_epoch)
        self._around = Around([task], task.epochs, steps_per_epoch, flat.device)

    def update(
        self,
        flat: Tensor,
        grad: Tensor,
        moments: tuple[Tensor, ...],
        step: Tensor,
        extras: Mapping[str, Tensor] = NOTHING,
    ) -> None:
        """As :meth:`Optimizer.update`, with numbers on the host."""
        at = 0 if step.is_meta else int(step)
        if at >= len(self._factors):  # its epochs are over
            return
        if "gradient" in extras:
            extras["gradient"].add_(grad / self._task.accumulate)
        if is_update(self._task, at, self._steps):
            grad = extras["gradient"].clone() if "gradient" in extras else grad
            rate = 1.0 if RATE not in extras or step.is_meta else float(extras[RATE])
            self.torch.update(self._layout.views(self._around.clipped(grad)[0]), self._factors[at] * rate)
            if "gradient" in extras:
                extras["gradient"].zero_()
        self._around.average(flat, step, extras)
