"""Users' own functions in a training loop: find them, call them for every member, check what they return.

Shapes: T members, N nodes, M rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from weft.core.compatibility import function_name
from weft.core.errors import SpecError
from weft.core.task import Task
from weft.runtime.loop.outputs import members_of, of_member
from weft.runtime.user_modules.importing import import_from

Measure = Callable[[Any, Tensor, Tensor], Any]  # (output, targets, rows) -> a number


def function_of(task: Task, setting: str) -> Callable[..., Any]:
    """The function of the user's own that ``setting`` is, or that it names as ``"file.py:function"``."""
    value = getattr(task, setting)
    found: Callable[..., Any] = import_from(task.label, setting, value) if isinstance(value, str) else value
    return found


class OwnMeasure:
    """A user's objective or metric ``(output, targets, rows) -> number`` for all members: ``[T]``.

    ``output`` is what the model returned for all rows of the batch (in float32), ``targets`` the labels of these,
    ``rows`` those to measure. It is called once per member, so that it can be written for one.
    """

    def __init__(self, task: Task, setting: str) -> None:
        self.name, self._setting, self._label = function_name(getattr(task, setting)), setting, task.label
        self.function: Measure = function_of(task, setting)
        own = self.function.named_parameters() if isinstance(self.function, nn.Module) else ()
        training = [name for name, one in own if one.requires_grad]
        if training and setting == "objective":
            raise SpecError(
                f"task {task.label!r}: objective {self.name} has parameters of its own ({', '.join(training)}), which "
                "no optimizer would train: let the model have them and return the loss, or freeze them"
            )

    def __call__(self, output: Any, labels: Tensor, rows: Tensor) -> Tensor:
        """The number of every member ``[T]``."""
        found = [self._one(of_member(output, row), labels, rows) for row in range(members_of(output))]
        return torch.stack(found)

    def _one(self, output: Any, labels: Tensor, rows: Tensor) -> Tensor:
        value = self.function(output, labels, rows)
        if self._setting == "metric" and isinstance(value, (int, float)):
            return torch.tensor(float(value), device=labels.device)
        if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
            what = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise SpecError(f"task {self._label!r}: {self._setting} {self.name} returned {what}; expected one number")
        if self._setting == "objective" and not value.requires_grad and torch.is_grad_enabled():
            self._check_followed(output)
        return value.reshape(()).float()

    def _check_followed(self, output: Any) -> None:
        """A :class:`SpecError` for a loss without a gradient, of an output that has one."""
        if any(isinstance(one, Tensor) and one.requires_grad for one in tree_leaves(output)):
            raise SpecError(
                f"task {self._label!r}: objective {self.name} returned a number that autograd cannot follow back to "
                "the model's output; compute it with torch, without detach, item or no_grad"
            )
