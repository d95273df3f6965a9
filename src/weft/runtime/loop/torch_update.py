"""TorchUpdate: update one task's weights with an optimizer of ``torch.optim``, or one that a user's function makes.

The optimizer gets parameters that are views of the flat weights, so everything around it stays as it is. It keeps
numbers in Python: the task trains alone and its step runs eagerly.

Shapes: P parameters.
"""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.compatibility import function_name
from weft.core.errors import SpecError
from weft.core.settings.loop_settings import group_of
from weft.core.task import OPTIMIZER_GIVEN, Task
from weft.runtime.loop.functions import function_of
from weft.runtime.loop.own_schedule import check_group_rates
from weft.runtime.loop.param_groups import check_patterns
from weft.runtime.user_modules.settings import takes

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
