"""Adam, AdamW and SGD on flat buffers, with every number in a table on the device; and torch's optimizers.

``hyper [10]`` is one row of the table: lr, beta1 (SGD: momentum), beta2, eps, weight_decay, decoupled, Adam's two bias
corrections ``1 - beta^t``, and ``1 - beta`` of both betas. The step looks its rows up by its own counter.
Shapes: T members, P parameters.
"""

from __future__ import annotations

import copy
import inspect
import io
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft import ops
from weft.core.compatibility import function_name, loop_parts
from weft.core.errors import SpecError
from weft.core.settings import group_of
from weft.core.task import OPTIMIZER_GIVEN, Task
from weft.runtime.modules.settings import takes
from weft.runtime.step.losses import function_of
from weft.runtime.step.parameters import Layout
from weft.runtime.step.schedules import RATE, check_group_rates, learning_rates, own_factors, rate_factors

# ---- Rates and decays per parameter, from ``param_groups``: Adam, AdamW and SGD with a number per element of the
# weights.
#
# Shapes: T members, P parameters.


def check_patterns(task: Task, names: Sequence[str]) -> None:
    """A :class:`SpecError` for a pattern that no parameter of the model is in."""
    found = {group_of(name, task.param_groups) for name in names}
    for pattern in task.param_groups:
        if pattern not in found:
            raise SpecError(
                f"task {task.label!r}: param_groups[{pattern!r}] is the group of no parameter of {task.model_name}; "
                f"they are called {', '.join(names)}, and the first pattern that matches counts"
            )


@dataclass(frozen=True)
class GroupRates:
    """``scales [T, P]`` of the learning rate, ``decays [T, P]`` of the weights."""

    scales: Tensor
    decays: Tensor

    @classmethod
    def of(cls, tasks: Sequence[Task], names: Sequence[str], sizes: Sequence[int], mask: Tensor | None) -> GroupRates:
        """Of parameters with ``names`` and ``sizes``; ``mask [P]``: where the tasks' own weight decay applies."""
        for task in tasks:
            check_patterns(task, names)
            check_group_rates(task, [group["lr"] for group in task.param_groups.values() if "lr" in group])
        scales, decays = [], []
        for task in tasks:
            groups = [task.param_groups.get(group_of(name, task.param_groups) or "", {}) for name in names]
            scales.append([float(group.get("lr", task.lr)) / task.lr for group in groups])
            decays.append([float(group.get("weight_decay", task.weight_decay)) for group in groups])
        repeats = torch.tensor(list(sizes))
        wide = [
            torch.tensor(rows, dtype=torch.float64).float().repeat_interleave(repeats, 1) for rows in (scales, decays)
        ]
        return cls(wide[0], wide[1] if mask is None else wide[1] * mask)

    def to(self, device: torch.device) -> GroupRates:
        """The same on another device."""
        return GroupRates(self.scales.to(device), self.decays.to(device))


def adam_groups_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, hyper: Tensor, groups: GroupRates
) -> None:
    """One Adam or AdamW step in place on ``[T, P]``; ``hyper [T, 10]`` as :func:`weft.ops.adam_` has it."""
    lr, _, beta2, eps, _, decoupled, correction1, correction2, rest1, rest2 = (
        column[:, None] for column in hyper.unbind(-1)
    )
    lr = lr * groups.scales
    param.mul_(1.0 - lr * groups.decays * decoupled)
    grad = grad + groups.decays * (1.0 - decoupled) * param
    exp_avg.lerp_(grad, rest1.expand_as(grad))
    exp_avg_sq.mul_(beta2).add_(rest2 * grad * grad)
    denominator = (exp_avg_sq / correction2).sqrt_().add_(eps)
    param.sub_(lr / correction1 * exp_avg / denominator)


def sgd_groups_(param: Tensor, grad: Tensor, velocity: Tensor, hyper: Tensor, groups: GroupRates) -> None:
    """One SGD step in place on ``[T, P]``."""
    lr, momentum = (hyper[:, column, None] for column in (0, 1))
    velocity.mul_(momentum).add_(grad).addcmul_(param, groups.decays)
    param.sub_(velocity * (lr * groups.scales))


# ---- TorchUpdate: update one task's weights with an optimizer of ``torch.optim``, or one that a user's function
# makes.
#
# The optimizer gets parameters that are views of the flat weights, so everything around it stays as it is. It keeps
# numbers in Python: the task trains alone and its step runs eagerly.
#
# Shapes: P parameters.

SAVED = "optimizer"  # its name in a checkpoint


class TorchUpdate:
    """The optimizer of ``task``. ``named``: its parameters, views of the flat weights; ``model``: what to build for.

    ``without``: names of parameters that have no gradient, which torch's optimizers skip.
    """

    without: frozenset[str] = frozenset()

    def __init__(self, task: Task, model: nn.Module, named: Mapping[str, Tensor]) -> None:
        self._task, self.name = task, function_name(task.optimizer)
        self._parameters = {name: nn.Parameter(view) for name, view in named.items()}
        self.optimizer = self._made(function_of(task, "optimizer"), model)
        self._check()
        self._initial = [group.get("lr") for group in self.optimizer.param_groups]

    @property
    def first_rate(self) -> float:
        """The learning rate of its first group."""
        return float(self._initial[0]) if self._initial[0] is not None else 1.0

    def _made(self, make: Callable[..., Any], model: nn.Module) -> torch.optim.Optimizer:
        task = self._task
        given = optimizer_arguments(task, make)
        of_model = takes_model(make)
        if of_model and task.param_groups:
            raise SpecError(f"task {task.label!r}: param_groups would have no effect: {self.name} is given the model")
        try:
            found = make(model, **given) if of_model else make(self._groups(), **given)
        except Exception as error:
            raise SpecError(f"task {task.label!r}: optimizer {self.name} could not be made: {error}") from error
        if not isinstance(found, torch.optim.Optimizer):
            raise SpecError(
                f"task {task.label!r}: optimizer {self.name} gave {type(found).__name__}; "
                "expected a torch.optim.Optimizer"
            )
        if of_model:
            self._take_over(found, model)
        return found

    def _groups(self) -> list[Any]:
        """All parameters, or one group per pattern and one of those in none."""
        task, patterns = self._task, self._task.param_groups
        if not patterns:
            return list(self._parameters.values())
        check_patterns(task, list(self._parameters))
        by_pattern: dict[str | None, list[Tensor]] = {}
        for name, parameter in self._parameters.items():
            by_pattern.setdefault(group_of(name, patterns), []).append(parameter)
        return [{"params": own, **patterns.get(pattern or "", {})} for pattern, own in by_pattern.items()]

    def _take_over(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Give the optimizer the views of the flat weights in place of the model's own parameters."""
        mine = {id(p): self._parameters.get(name) for name, p in model.named_parameters()}
        for group in optimizer.param_groups:
            group["params"] = [self._mine(mine, p) for p in group["params"]]
        for parameter in list(optimizer.state):
            optimizer.state[self._mine(mine, parameter)] = optimizer.state.pop(parameter)

    def _mine(self, mine: Mapping[int, Tensor | None], parameter: Tensor) -> Tensor:
        if id(parameter) not in mine:
            raise SpecError(f"task {self._task.label!r}: optimizer {self.name} has a parameter that is not the model's")
        found = mine[id(parameter)]
        return parameter if found is None else found  # a frozen one has no gradient, and stays as it is

    def _check(self) -> None:
        task = self._task
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        left = [name for name, p in self._parameters.items() if id(p) not in held]
        if left:
            raise SpecError(
                f"task {task.label!r}: optimizer {self.name} leaves out {', '.join(left)}; freeze what is not to train "
                "with requires_grad_(False)"
            )
        closure = inspect.signature(self.optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise SpecError(
                f"task {task.label!r}: optimizer {self.name} computes the loss several times per step by itself, which "
                "Weft's steps do not offer"
            )
        moves = task.schedule != "constant" or task.warmup or task.callbacks
        if moves and any("lr" not in group for group in self.optimizer.param_groups):
            raise SpecError(f"task {task.label!r}: optimizer {self.name} has no lr for a schedule to change")
        if task.plateau.get("min_lr") and len({str(group.get("lr")) for group in self.optimizer.param_groups}) > 1:
            raise SpecError(
                f"task {task.label!r}: plateau: min_lr does not go with groups of different rates: "
                "one factor serves all"
            )
        check_group_rates(task, [float(group["lr"]) for group in self.optimizer.param_groups if "lr" in group])
        if not next(iter(self._parameters.values())).is_meta:
            self._try_out()

    def _try_out(self) -> None:
        """One step of a copy, so that an optimizer that cannot be used is known before the first epoch."""
        trial = copy.deepcopy(self.optimizer)
        for group in trial.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        try:
            trial.step()
        except Exception as error:
            raise SpecError(f"task {self._task.label!r}: optimizer {self.name} cannot take a step: {error}") from error

    def update(self, grads: Sequence[Tensor], factor: float) -> None:
        """One step with ``grads``, in the order of the parameters, at ``factor`` times the rates it began with."""
        for (name, parameter), grad in zip(self._parameters.items(), grads, strict=True):
            parameter.grad = None if name in self.without else grad
        for group, rate in zip(self.optimizer.param_groups, self._initial, strict=True):
            if rate is not None and factor != 1.0:
                group["lr"] = rate * factor
            elif rate is not None:
                group["lr"] = rate
        self.optimizer.step()
        for parameter in self._parameters.values():
            parameter.grad = None

    def saved(self) -> dict[str, Tensor]:
        """Its state for a checkpoint."""
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        return {SAVED: torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`saved`."""
        if SAVED not in saved:
            raise SpecError(f"task {self._task.label!r}: the checkpoint has no state of optimizer {self.name}")
        file = io.BytesIO(bytes(saved[SAVED].cpu().numpy().tobytes()))
        try:
            self.optimizer.load_state_dict(torch.load(file, weights_only=True))
        except Exception as error:
            raise SpecError(
                f"task {self._task.label!r}: optimizer {self.name} keeps something that a checkpoint cannot hold, so "
                f"its training cannot be resumed ({str(error).splitlines()[0]}); start afresh with overwrite"
            ) from error


def takes_model(make: Callable[..., Any]) -> bool:
    """Whether an optimizer is made of the whole model: by a function whose first parameter is called ``model``."""
    try:
        names = list(inspect.signature(make).parameters)
    except (TypeError, ValueError):
        return False
    return names[:1] == ["model"]


def optimizer_arguments(task: Task, make: Callable[..., Any]) -> dict[str, Any]:
    """Settings that the task gives and the optimizer takes, and ``optimizer_args``; its own defaults for the rest."""
    given = {name: getattr(task, name) for name in OPTIMIZER_GIVEN if name in task.given and takes(make, name)}
    for name in task.optimizer_args:
        if not takes(make, name):
            raise SpecError(
                f"task {task.label!r}: optimizer_args: {function_name(task.optimizer)} has no parameter {name!r}"
            )
    return given | task.optimizer_args


# ---- Which steps update the weights, and what happens to a gradient before: accumulation, clipping, averaging.
#
# Everything is a comparison or a table on the device, so that one captured step serves all epochs and members.
# Shapes: T members, P parameters, S steps.


def is_update(task: Task, step: int, steps_per_epoch: int) -> bool:
    """Whether the weights are updated in ``step`` (counted from 0).

    With ``accumulate=k``, after every k-th step of an epoch and after its last; where an epoch is one step, after
    every k-th epoch.
    """
    place = step if steps_per_epoch == 1 else step % steps_per_epoch
    return (place + 1) % task.accumulate == 0 or (steps_per_epoch > 1 and place + 1 == steps_per_epoch)


def update_counts(task: Task, steps_per_epoch: int) -> list[int]:
    """After every step of the training, how many updates there were so far."""
    if task.accumulate == 1:
        return list(range(1, task.epochs * steps_per_epoch + 1))
    total, found = 0, []
    for step in range(task.epochs * steps_per_epoch):
        total += is_update(task, step, steps_per_epoch)
        found.append(total)
    return found


class Accumulation:
    """Adds up gradients over the steps of an update: their sum divided by ``accumulate``, as of ``loss / k``."""

    def __init__(
        self, tasks: Sequence[Task], length: int, steps_per_epoch: int, spare: int, device: torch.device
    ) -> None:
        self._parts = torch.tensor([1.0 / task.accumulate for task in tasks], device=device)[:, None]
        due = torch.zeros(len(tasks), length * steps_per_epoch + spare, dtype=torch.bool)
        for row, task in zip(due, tasks, strict=True):
            steps = range(task.epochs * steps_per_epoch)
            row[: len(steps)] = torch.tensor([is_update(task, step, steps_per_epoch) for step in steps])
        self._due = due.to(device)

    def due(self, step: Tensor) -> Tensor:
        """Which members are updated in ``step [1]``: ``[T, 1]`` bool."""
        return self._due.index_select(1, step)

    def add(self, sums: Tensor, grad: Tensor) -> Tensor:
        """Add a step's gradient ``[T, P]`` to the ``sums`` so far; gives a copy of these."""
        return sums.add_(grad * self._parts).clone()


class Clipping:
    """Bounds the gradient of every member: its norm, or each of its numbers."""

    def __init__(self, tasks: Sequence[Task], device: torch.device) -> None:
        self._by_norm = tasks[0].clip_norm is not None
        limits = [task.clip_norm if self._by_norm else task.clip_value for task in tasks]
        self._limits = torch.tensor(limits, device=device)[:, None]

    def __call__(self, grad: Tensor) -> Tensor:
        """The clipped gradient ``[T, P]``, as ``clip_grad_norm_`` or ``clip_grad_value_`` give it."""
        if not self._by_norm:
            return torch.maximum(torch.minimum(grad, self._limits), -self._limits)
        norm = torch.linalg.vector_norm(grad, dim=-1, keepdim=True)
        return grad * (self._limits / (norm + 1e-6)).clamp(max=1.0)


class Averaging:
    """The exponential moving average of the weights, as ``torch.optim.swa_utils.get_ema_multi_avg_fn`` has it.

    The first update copies the weights; every later one moves the average by ``1 - decay`` of the way to them.
    """

    def __init__(
        self, tasks: Sequence[Task], length: int, steps_per_epoch: int, spare: int, device: torch.device
    ) -> None:
        shares = torch.zeros(len(tasks), length * steps_per_epoch + spare)
        for row, task in zip(shares, tasks, strict=True):
            own = _average_shares(task, steps_per_epoch)
            row[: len(own)] = torch.tensor(own)
        self._shares = shares.to(device)

    def __call__(self, average: Tensor, flat: Tensor, step: Tensor) -> None:
        """Take the weights ``flat [T, P]`` after ``step [1]`` into ``average``."""
        average.lerp_(flat, self._shares.index_select(1, step).expand_as(flat))


def _average_shares(task: Task, steps_per_epoch: int) -> list[float]:
    """How far the average moves in every step: all the way at the first update, not at all between updates."""
    counts = update_counts(task, steps_per_epoch)
    pairs = zip([0, *counts], counts, strict=False)
    return [0.0 if now == before else 1.0 if before == 0 else 1.0 - (task.ema or 0.0) for before, now in pairs]


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

    What else a training loop does with gradients and weights (:mod:`weft.runtime.step.optimizers`) is here where the
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
