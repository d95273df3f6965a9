"""Adam, AdamW and SGD on flat buffers, with every number in a table on the device; torch's optimizers; schedules.

``hyper [10]`` is one row of the table: lr, beta1 (SGD: momentum), beta2, eps, weight_decay, decoupled, Adam's two bias
corrections ``1 - beta^t``, and ``1 - beta`` of both betas. The step looks its rows up by its own counter. Which steps
update the weights, clipping and averages are comparisons and tables on the device as well, so that one captured step
serves all epochs and members. Shapes: T members, P parameters, S steps.
"""

from __future__ import annotations

import copy
import inspect
import io
import math
import warnings
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from weft import ops
from weft.core.compatibility import function_name, loop_parts
from weft.core.errors import SpecError
from weft.core.settings import PLATEAU, group_of, lower_is_better
from weft.core.task import OPTIMIZER_GIVEN, OPTIMIZER_SETTINGS, Task, takes
from weft.ops.dense.adam import adam_torch
from weft.runtime.modules.settings import function_of, in_words
from weft.runtime.step.forward import Layout
from weft.runtime.step.state import RATE, State, write_row

SPARE = 4  # rows beyond the last step, for the warm-up of a capture that begins there
NUMBERS = 10  # of a row
SAVED, REACHED = "optimizer", "reached"  # names in a checkpoint of torch's optimizer, and in that of its own
TORCHS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


# ---- Learning-rate schedules, computed for every step before the first one.
#
# The step looks its rate up by its own counter, so that a replayed step needs nothing from the host. A schedule may be
# a user's own function of the epoch, or one of ``torch.optim.lr_scheduler``, which is stepped with an optimizer that
# trains nothing.
#
# Shapes: T members, M columns of history.

HINT = "; a function that makes a scheduler has a parameter called optimizer, any other is called with the epoch"
LEAST_CHANGE = 1e-8  # of a rate; torch's eps

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda t: 1.0,
    "cosine": lambda t: 0.5 * (1.0 + math.cos(math.pi * t)),  # half a cosine from 1 down to 0
    "linear": lambda t: 1.0 - t,
    "step": lambda t: 1.0 if t < 0.5 else 0.1 if t < 0.75 else 0.01,  # at half and three quarters of the training
    "plateau": lambda t: 1.0,  # what lowers it is in the state (Plateau)
}


def first_parameter(function: Callable[..., Any]) -> str | None:
    """The name of the first parameter of ``function``; None if it has none, or if that cannot be read."""
    try:
        return next(iter(inspect.signature(function).parameters), None)
    except (TypeError, ValueError):
        return None


def own_factors(task: Task) -> list[float]:
    """The factor of ``lr`` for every epoch, counted from 0, of a schedule of the user's own."""
    schedule, name = function_of(task, "schedule"), function_name(task.schedule)
    makes_scheduler = first_parameter(schedule) == "optimizer"
    try:
        if not makes_scheduler:
            factors = [schedule(epoch) for epoch in range(task.epochs)]
        elif task.has_own("optimizer") and "lr" not in task.given:
            raise SpecError(f"task {task.label!r}: schedule {name} needs lr= of the task to begin with")
        else:
            factors = [rate / task.lr for rate in _scheduler_rates(task, schedule, task.lr)]
    except SpecError:
        raise
    except Exception as error:
        expects_optimizer = "ptimizer" in str(error) or "'int' object" in str(error)
        misread = not makes_scheduler and expects_optimizer and isinstance(error, (TypeError, AttributeError))
        hint = HINT if misread else ""
        raise SpecError(f"task {task.label!r}: schedule {name} raised {in_words(error, __file__)}{hint}") from error
    numbers = [float(f) if isinstance(f, (int, float)) or hasattr(f, "item") else math.nan for f in factors]
    for epoch, number in enumerate(numbers):
        if not 0 <= number < math.inf:
            raise SpecError(
                f"task {task.label!r}: schedule {name}({epoch}) is {factors[epoch]!r}; expected a factor of lr, "
                "at least 0"
            )
    return numbers


def check_group_rates(task: Task, rates: Iterable[float]) -> None:
    """A :class:`SpecError` if a scheduler of torch's would not multiply ``rates``, which groups of parameters have.

    Some set rates of their own (``CyclicLR``, ``eta_min`` of cosines); here one factor serves all groups.
    """
    schedule = function_of(task, "schedule") if task.has_own("schedule") else None
    different = sorted({float(rate) for rate in rates} - {task.lr})
    if schedule is None or not different or first_parameter(schedule) != "optimizer":
        return
    factors = own_factors(task)
    for rate in different:
        pairs = zip(_scheduler_rates(task, schedule, rate), factors, strict=True)
        if any(abs(true - rate * factor) > 1e-6 * max(true, rate) for true, factor in pairs):
            raise SpecError(
                f"task {task.label!r}: schedule {function_name(task.schedule)} does not multiply every rate by the "
                f"same factor, and a group of parameters has lr={rate:g} beside the task's lr={task.lr:g}; give groups "
                "the same lr, or a schedule that is a function of the epoch"
            )


def _scheduler_rates(task: Task, make: Callable[..., Any], first: float) -> list[float]:
    """The rates of all epochs that a scheduler of torch's sets, for a group that begins with ``first``."""
    start = f"task {task.label!r}: schedule {function_name(task.schedule)}"
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=first, momentum=0.5)
    (group,) = optimizer.param_groups
    before = {key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr")}
    scheduler, rates = make(optimizer), []
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) or not hasattr(scheduler, "step"):
        raise SpecError(f"{start} gave {type(scheduler).__name__}, not a scheduler that needs the epoch alone")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps beyond its last
        for _ in range(task.epochs):
            rates.append(float(group["lr"]))
            changed = [key for key, value in before.items() if group[key] != value]
            if changed:
                raise SpecError(f"{start} changes more than the learning rate: {', '.join(changed)}")
            optimizer.step()
            scheduler.step()
    return rates


def learning_rates(task: Task, steps_per_epoch: int = 1) -> list[float]:
    """The rate of every step: ``warmup`` epochs rising to ``lr``, then the schedule over the rest."""
    if task.has_own("schedule"):
        return [task.lr * factor for factor in own_factors(task) for _ in range(steps_per_epoch)]
    warmup, rest = task.warmup * steps_per_epoch, (task.epochs - task.warmup) * steps_per_epoch
    rising = [task.lr * (step + 1) / warmup for step in range(warmup)]
    if task.schedule in ("constant", "plateau"):
        return rising + [task.lr] * rest
    factor = SCHEDULES[task.schedule]
    return rising + [task.lr * factor(step / rest) for step in range(rest)]


class Plateau:
    """Lower a member's rate when a column of its history stops improving, by comparisons on the device.

    The rule is that of torch's ``ReduceLROnPlateau`` (relative threshold), applied after every evaluation of the
    member. ``columns`` are those of a row; ``rates``: the learning rate that each task begins with.
    """

    def __init__(
        self, tasks: Sequence[Task], columns: Sequence[str], rates: Sequence[float], device: torch.device
    ) -> None:
        settings = [PLATEAU | task.plateau for task in tasks]
        watched = [str(setting["watch"]) for setting in settings]
        for task, column in zip(tasks, watched, strict=True):
            if column not in columns:
                raise SpecError(
                    f"task {task.label!r}: plateau watches {column!r}, which is not measured; set its watch "
                    f"to one of {', '.join(columns)}"
                )
            if task.plateau.get("min_lr") and any("lr" in group for group in task.param_groups.values()):
                raise SpecError(
                    f"task {task.label!r}: plateau: min_lr does not go with a lr per group in param_groups: "
                    "one factor serves all groups"
                )
        names = ("factor", "threshold", "patience", "cooldown", "min_lr")
        rows = [[float(setting[name]) for setting in settings] for name in names]
        numbers = torch.tensor(rows, dtype=torch.float64, device=device)
        self._factor, self._threshold, self._patience, cooldown, least = numbers.unbind(0)
        self._cooldown = cooldown.long()
        self._rates = torch.tensor(list(rates), dtype=torch.float64, device=device)
        self._least = least / self._rates
        self._column = torch.tensor([columns.index(column) for column in watched], device=device)[:, None]
        self._lower = torch.tensor([lower_is_better(column) for column in watched], device=device)
        self._every = torch.tensor([task.eval_every for task in tasks], device=device)
        self._epochs = torch.tensor([task.epochs for task in tasks], device=device)

    def __call__(self, state: dict[str, Tensor], rows: Tensor, epoch: Tensor) -> None:
        """After an evaluation ``rows [T, M]`` at the end of ``epoch [T]``, counted from 0."""
        due = ((epoch + 1) % self._every == 0) | (epoch + 1 == self._epochs)
        value, best = rows.gather(1, self._column).squeeze(1).double(), state["plateau_best"]
        bound = best * torch.where(self._lower, 1.0 - self._threshold, 1.0 + self._threshold)
        better = torch.where(self._lower, value < bound, value > bound)
        bad = torch.where(better, 0, state["plateau_bad"] + 1)
        cooling = state["plateau_cooldown"]
        bad, remaining = torch.where(cooling > 0, 0, bad), torch.where(cooling > 0, cooling - 1, cooling)
        lower = bad > self._patience
        rate = state[RATE]
        reduced = torch.maximum(rate * self._factor, self._least)
        changes = lower & (self._rates * (rate - reduced) > LEAST_CHANGE)
        new = {
            "plateau_best": torch.where(better, value, best),
            "plateau_bad": torch.where(lower, 0, bad),
            "plateau_cooldown": torch.where(lower, self._cooldown, remaining),
            RATE: torch.where(changes, reduced, rate),
        }
        for name, values in new.items():
            state[name].copy_(torch.where(due, values, state[name]))


# ---- Parameters in groups, and updates after several steps.


def check_patterns(task: Task, names: Sequence[str]) -> None:
    """A :class:`SpecError` for a pattern that no parameter of the model is in."""
    groups = {group_of(name, task.param_groups) for name in names}
    for pattern in task.param_groups:
        if pattern not in groups:
            raise SpecError(
                f"task {task.label!r}: param_groups[{pattern!r}] is the group of no parameter of {task.model_name}; "
                f"they are called {', '.join(names)}, and the first pattern that matches counts"
            )


def is_update(task: Task, step: int, steps_per_epoch: int) -> bool:
    """Whether the weights are updated in ``step`` (counted from 0).

    With ``accumulate=k``, after every k-th step of an epoch and after its last; where an epoch is one step, after
    every k-th epoch.
    """
    position = step if steps_per_epoch == 1 else step % steps_per_epoch
    return (position + 1) % task.accumulate == 0 or (steps_per_epoch > 1 and position + 1 == steps_per_epoch)


def update_counts(task: Task, steps_per_epoch: int) -> list[int]:
    """After every step of the training, how many updates there were so far."""
    steps = range(task.epochs * steps_per_epoch)
    if task.accumulate == 1:
        return [step + 1 for step in steps]
    return list(accumulate(int(is_update(task, step, steps_per_epoch)) for step in steps))


# ---- the table of numbers ----------------------------------------------------------------------------


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
    corrections = array("d")
    for count in range(1, int(counts[-1]) + 1):
        corrections.append(1 - beta**count)
        if corrections[-1] == 1.0:
            break
    corrections = corrections or array("d", [1 - beta])
    return torch.frombuffer(corrections, dtype=torch.float64)[counts.clamp(1, len(corrections)) - 1]


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


class LoopRules:
    """What some training loops do around an update: add up gradients, clip them, average the weights after it.

    ``due [T, S]``: which members are updated in a step, None if all are in every step. Gradients are added up as
    those of ``loss / accumulate`` (``shares [T, 1]``).
    """

    def __init__(self, tasks: Sequence[Task], length: int, steps_per_epoch: int, device: torch.device) -> None:
        parts, steps = loop_parts(tasks[0]), length * steps_per_epoch + SPARE
        self.due: Tensor | None = None
        self._limits: Tensor | None = None
        self._average_shares: Tensor | None = None
        if "accumulate" in parts:
            self.shares = torch.tensor([1.0 / task.accumulate for task in tasks], device=device)[:, None]
            due = torch.zeros(len(tasks), steps, dtype=torch.bool)
            for row, task in zip(due, tasks, strict=True):
                count = task.epochs * steps_per_epoch
                row[:count] = torch.tensor([is_update(task, step, steps_per_epoch) for step in range(count)])
            self.due = due.to(device)
        if "clip_norm" in parts or "clip_value" in parts:
            self._by_norm = tasks[0].clip_norm is not None
            limits = [task.clip_norm if self._by_norm else task.clip_value for task in tasks]
            self._limits = torch.tensor(limits, device=device)[:, None]
        if "ema" in parts:
            shares = torch.zeros(len(tasks), steps)
            for row, task in zip(shares, tasks, strict=True):
                counts = update_counts(task, steps_per_epoch)
                pairs, later = zip([0, *counts], counts, strict=False), 1.0 - (task.ema or 0.0)
                values = [0.0 if now == before else 1.0 if before == 0 else later for before, now in pairs]
                row[: len(values)] = torch.tensor(values)
            self._average_shares = shares.to(device)

    def clipped(self, grad: Tensor) -> Tensor:
        """The gradient ``[T, P]`` within its bounds, as ``clip_grad_norm_`` or ``clip_grad_value_`` give it."""
        if self._limits is None:
            return grad
        if not self._by_norm:
            return torch.maximum(torch.minimum(grad, self._limits), -self._limits)
        norm = torch.linalg.vector_norm(grad, dim=-1, keepdim=True)
        return grad * (self._limits / (norm + 1e-6)).clamp(max=1.0)

    def average(self, state: State) -> None:
        """Move the average of the weights, as ``torch.optim.swa_utils.get_ema_multi_avg_fn`` does.

        The first update copies the weights; every later one moves the average by ``1 - decay`` of the way to them.
        """
        if self._average_shares is not None:
            shares = state.rows_of(self._average_shares)
            state.extras["ema"].lerp_(state.flat, shares.to(state.flat).expand_as(state.flat))


class Optimizer:
    """The update of the flat buffers of T members in one call; all of them SGD, or all Adam or AdamW.

    With ``param_groups`` there is a number per element of the weights: ``scales [T, P]`` of the learning rate and
    ``decays [T, P]`` of the weights.
    """

    def __init__(
        self, tasks: Sequence[Task], layout: Layout, length: int, device: torch.device, steps_per_epoch: int = 1
    ) -> None:
        self._sgd = tasks[0].optimizer == "sgd"
        self._table = stacked_table(tasks, length, steps_per_epoch, device)
        mask = layout.decay_mask() if any(task.weight_decay or task.param_groups for task in tasks) else None
        self._mask = None if mask is None else mask.to(device)
        self._rules = LoopRules(tasks, length, steps_per_epoch, device)
        self._grouped = "param_groups" in loop_parts(tasks[0])
        if not self._grouped:
            return
        scales, decays = [], []
        for task in tasks:
            check_patterns(task, layout.names)
            check_group_rates(task, [group["lr"] for group in task.param_groups.values() if "lr" in group])
            groups = [task.param_groups.get(group_of(name, task.param_groups) or "", {}) for name in layout.names]
            scales.append([float(group.get("lr", task.lr)) / task.lr for group in groups])
            decays.append([float(group.get("weight_decay", task.weight_decay)) for group in groups])
        repeats = torch.tensor(layout.sizes)
        self._scales, self._decays = (
            torch.tensor(rows, dtype=torch.float64).float().repeat_interleave(repeats, 1).to(device)
            for rows in (scales, decays)
        )
        if self._mask is not None:  # where the tasks' own weight decay applies
            self._decays = self._decays * self._mask

    def update(self, state: State, grad: Tensor) -> None:
        """Apply ``grad [T, P]`` to the weights of ``state`` in place; its step counter picks the rows of the table."""
        flat, moments, rules = state.flat, state.moments, self._rules
        hyper, row = self._table, state.step  # Adam's kernel looks its rows up by itself
        if self._sgd or self._grouped or RATE in state.extras or state.rowwise:
            hyper, row = state.rows_of(self._table).squeeze(1), None
        if RATE in state.extras:
            hyper[:, 0] *= state.extras[RATE].float()
        if rules.due is not None:
            sums, due = state.extras["gradient"], state.rows_of(rules.due)
            grad, before = sums.add_(grad * rules.shares).clone(), [tensor.clone() for tensor in (flat, *moments)]
        grad = rules.clipped(grad)
        if self._sgd:
            # v = momentum v + g + decay w, w -= lr v
            lr, momentum, decay = (hyper[:, column, None] for column in (0, 1, 4))
            if self._grouped:
                lr, decay = lr * self._scales, self._decays
            elif self._mask is not None:
                decay = decay * self._mask
            moments[0].mul_(momentum).add_(grad).addcmul_(flat, decay)
            flat.sub_(moments[0] * lr)
        elif self._grouped:
            adam_torch(flat, grad, *moments, hyper, self._decays, rate_scales=self._scales)
        else:
            ops.adam_(flat, grad, *moments, hyper, self._mask, row)
        if rules.due is not None:  # members between updates keep theirs
            for now, old in zip((flat, *moments), before, strict=True):
                now.copy_(torch.where(due, now, old))
            sums.copy_(torch.where(due, 0.0, sums))
        rules.average(state)

    def fill(self, row: int, of_one: Optimizer) -> None:
        """Take over the numbers of the optimizer of one task for the member in ``row``."""
        write_row(self, row, of_one)
        write_row(self._rules, row, of_one._rules)

    def saved(self) -> dict[str, Tensor]:
        """Nothing: all of it is in the state."""
        return {}


class TorchOptimizer:
    """The update of one task's weights by an optimizer of ``torch.optim``, or one that a user's function makes.

    Weft's own are replaced by torch's for what they cannot do: parameters that have a gradient in some steps and none
    in others, which torch skips there, sparse gradients, and parameters of other types than float32.

    The optimizer gets parameters that are views of the flat weights, so everything around it is unchanged. It keeps
    its moments and numbers in Python: the task trains alone and its step runs eagerly. ``first_rate``: the rate of its
    first group.
    """

    def __init__(self, task: Task, layout: Layout, model: nn.Module, flat: Tensor, steps_per_epoch: int = 1) -> None:
        self._task, self._layout, self._steps = task, layout, steps_per_epoch
        self._reached: set[str] = set()  # parameters that had a gradient since the last update
        self.name = function_name(task.optimizer)
        self._parameters = {name: nn.Parameter(view) for name, view in layout.named(flat.detach()[0]).items()}
        self._optimizer = self._made(model)
        # A :class:`SpecError` before the first epoch for an optimizer that cannot be used.
        groups = self._optimizer.param_groups
        start = f"task {task.label!r}: optimizer {self.name}"
        held = {id(p) for group in groups for p in group["params"]}
        missing = [name for name, p in self._parameters.items() if id(p) not in held]
        if missing:
            raise SpecError(
                f"{start} leaves out {', '.join(missing)}; freeze what is not to train with requires_grad_(False)"
            )
        closure = inspect.signature(self._optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise SpecError(
                f"{start} computes the loss several times per step by itself, which Weft's steps do not offer"
            )
        moves = task.schedule != "constant" or task.warmup or task.callbacks
        if moves and any("lr" not in group for group in groups):
            raise SpecError(f"{start} has no lr for a schedule to change")
        if task.plateau.get("min_lr") and len({str(group.get("lr")) for group in groups}) > 1:
            raise SpecError(
                f"task {task.label!r}: plateau: min_lr does not go with groups of different rates: "
                "one factor serves all"
            )
        check_group_rates(task, [float(group["lr"]) for group in groups if "lr" in group])
        self._initial = [group.get("lr") for group in groups]
        own = task.has_own("optimizer")
        self.first_rate = 1.0 if self._initial[0] is None else float(self._initial[0] if own else task.lr)
        if task.has_own("schedule"):  # every step's rate, as a factor of what it begins with
            self._factors = [factor for factor in own_factors(task) for _ in range(steps_per_epoch)]
        else:
            self._factors = [rate / task.lr for rate in learning_rates(task, steps_per_epoch)]
        self._rules = LoopRules([task], task.epochs, steps_per_epoch, flat.device)

    def try_step(self, sparse: Collection[str]) -> None:
        """A :class:`SpecError` if it cannot take a step with gradients of which those of ``sparse`` are sparse."""
        task, remark = self._task, "; torch.optim.SGD and Adagrad take sparse and dense ones" if sparse else ""
        if sparse and task.accumulate > 1:
            raise SpecError(f"task {task.label!r}: the gradient of {sorted(sparse)[0]} is sparse: leave out accumulate")
        trial, own = copy.deepcopy((self._optimizer, self._parameters))
        for name, parameter in own.items():
            zeros = torch.zeros_like(parameter)
            parameter.grad = zeros.to_sparse(1) if name in sparse else zeros
        try:
            self._clip(list(own.values()))
            trial.step()
        except Exception as error:
            raise SpecError(
                f"task {task.label!r}: optimizer {self.name} cannot take a step: {error}{remark}"
            ) from error

    def take_over(self, state: State, without: Collection[str]) -> None:
        """Go on from the moments of an :class:`Optimizer` that has never updated the parameters ``without``."""
        task, step = self._task, int(state.step)
        updates = update_counts(task, self._steps)[step - 1] if step else 0
        rows = [self._layout.views(moment[0]) for moment in state.moments]
        for position, (name, parameter) in enumerate(self._parameters.items()):
            if updates and name not in without and (task.optimizer != "sgd" or task.momentum):
                moments = {key: row[position] for key, row in zip(MOMENTS[task.optimizer], rows, strict=True)}
                self._optimizer.state[parameter] = {"step": torch.tensor(float(updates)), **moments}
        if step and not is_update(task, step - 1, self._steps):
            self._reached = {*self._parameters} - {*without}

    def _clip(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._task.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self._task.clip_norm)
        elif self._task.clip_value is not None:
            nn.utils.clip_grad_value_(parameters, self._task.clip_value)

    def _made(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer by the user's class or function, with the settings that the task gives and it takes."""
        task, start = self._task, f"task {self._task.label!r}: "
        if not task.has_own("optimizer"):
            check_patterns(task, self._layout.names)
            groups = []
            for (name, parameter), decayed in zip(self._parameters.items(), self._layout.decayed, strict=True):
                numbers = {"lr": task.lr, "weight_decay": task.weight_decay}
                numbers |= task.param_groups.get(group_of(name, task.param_groups) or "", {})
                groups.append({"params": [parameter], **numbers, **({} if decayed else {"weight_decay": 0.0})})
            names = [name for name, users in OPTIMIZER_SETTINGS.items() if task.optimizer in users]
            return TORCHS[task.optimizer](groups, **{name: getattr(task, name) for name in names})
        make = function_of(task, "optimizer")
        settings = {name: getattr(task, name) for name in OPTIMIZER_GIVEN if name in task.given and takes(make, name)}
        for name in task.optimizer_args:
            if not takes(make, name):
                raise SpecError(f"{start}optimizer_args: {self.name} has no parameter {name!r}")
        settings |= task.optimizer_args
        of_model = first_parameter(make) == "model"
        what: list[Tensor] | list[dict[str, object]] | nn.Module = model
        if of_model and task.param_groups:
            raise SpecError(f"{start}param_groups would have no effect: {self.name} is given the model")
        if not of_model and not task.param_groups:
            what = list(self._parameters.values())
        elif not of_model:  # a group per pattern, and one of the parameters in none
            check_patterns(task, list(self._parameters))
            by_pattern: dict[str | None, list[Tensor]] = {}
            for name, parameter in self._parameters.items():
                by_pattern.setdefault(group_of(name, task.param_groups), []).append(parameter)
            what = [{"params": some, **task.param_groups.get(key or "", {})} for key, some in by_pattern.items()]
        try:
            optimizer = make(what, **settings)
        except Exception as error:
            raise SpecError(f"{start}optimizer {self.name} could not be made: {error}") from error
        if not isinstance(optimizer, torch.optim.Optimizer):
            kind = type(optimizer).__name__
            raise SpecError(f"{start}optimizer {self.name} gave {kind}; expected a torch.optim.Optimizer")
        if of_model:  # it takes the views of the flat weights in place of the model's own parameters
            # A frozen parameter has no gradient, and stays as it is.
            views = {id(p): self._parameters.get(name, p) for name, p in model.named_parameters()}
            held = [p for group in optimizer.param_groups for p in group["params"]]
            if any(id(parameter) not in views for parameter in (*held, *optimizer.state)):
                raise SpecError(f"{start}optimizer {self.name} has a parameter that is not the model's")
            for group in optimizer.param_groups:
                group["params"] = [views[id(parameter)] for parameter in group["params"]]
            for parameter in list(optimizer.state):
                optimizer.state[views[id(parameter)]] = optimizer.state.pop(parameter)
        return optimizer

    def update(self, state: State, grad: Tensor, grads: Sequence[Tensor | None]) -> None:
        """As :meth:`Optimizer.update`, with numbers on the host; ``grads``: its parts, or None."""
        step, extras = 0 if state.step.is_meta else int(state.step), state.extras
        if step >= len(self._factors):  # its epochs are over
            return
        self._reached |= {name for name, part in zip(self._parameters, grads, strict=True) if part is not None}
        if "gradient" in extras:
            extras["gradient"].add_(grad / self._task.accumulate)
            grads = self._layout.views(extras["gradient"][0].clone())
        if is_update(self._task, step, self._steps):
            rate = 1.0 if RATE not in extras or state.step.is_meta else float(extras[RATE])
            factor = self._factors[step] * rate
            weights = self._layout.views(state.flat[0])
            for (name, parameter), part, weight in zip(self._parameters.items(), grads, weights, strict=True):
                parameter.grad = part if name in self._reached else None
                if self._layout.other_kinds:  # the flat weights hold copies
                    parameter.data.copy_(weight)
            self._clip(list(self._parameters.values()))
            self._reached = set()
            for group, initial in zip(self._optimizer.param_groups, self._initial, strict=True):
                if initial is not None:
                    group["lr"] = initial if factor == 1.0 else initial * factor
            self._optimizer.step()
            for parameter in self._parameters.values():
                parameter.grad = None
            if self._layout.other_kinds:
                state.flat[0] = self._layout.flatten(self._parameters)
            if "gradient" in extras:
                extras["gradient"].zero_()
        self._rules.average(state)

    def saved(self) -> dict[str, Tensor]:
        """Its state for a checkpoint."""
        file = io.BytesIO()
        torch.save({**self._optimizer.state_dict(), REACHED: sorted(self._reached)}, file)
        return {SAVED: torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`saved`."""
        if SAVED not in saved:
            raise SpecError(f"task {self._task.label!r}: the checkpoint has no state of optimizer {self.name}")
        file = io.BytesIO(bytes(saved[SAVED].cpu().numpy().tobytes()))
        try:
            state = torch.load(file, weights_only=True)
            self._reached = set(state.pop(REACHED, ()))
            self._optimizer.load_state_dict(state)
        except Exception as error:
            raise SpecError(
                f"task {self._task.label!r}: optimizer {self.name} keeps something that a checkpoint cannot hold, so "
                f"its training cannot be resumed ({str(error).splitlines()[0]}); start afresh with overwrite"
            ) from error
