"""Try users' own objective and metric before the first epoch: whether they are functions of what they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.core.compatibility import function_name
from weft.core.errors import SpecError
from weft.core.task import Task
from weft.runtime.device.torch_rng import generator_states, same_draws

REPEATED = 1e-5  # of the largest: sums on a GPU may be added up in another order each time


def try_measures(measured: Callable[[], Tensor], task: Task, device: torch.device) -> str | None:
    """Call ``measured()``, which calls the functions, twice; why its step can neither be stacked nor captured, or None.

    A :class:`SpecError` if the second call gives other numbers: the functions are also called in evaluations, so what
    they keep between calls would not be what it is in a plain loop.
    """
    names = ", ".join(_named(task))
    before = generator_states(device)
    with same_draws(device) as moved:
        first = measured().detach().clone()
        drawn = moved() or any(not torch.equal(now, before[key]) for key, now in generator_states(device).items())
    if first.is_meta:
        return None
    with same_draws(device):
        second = measured().detach()
    largest = float(first.abs().nan_to_num(0.0, 0.0, 0.0).max())
    if not torch.allclose(first, second, rtol=0.0, atol=REPEATED * max(largest, 1e-30), equal_nan=True):
        raise SpecError(
            f"task {task.label!r}: {names} gives other numbers when called again with the same; Weft also calls it in "
            "evaluations, so write it without anything that it keeps between calls"
        )
    return f"{names} draws random numbers" if drawn else None


def check_reads_output_alone(loss: Callable[[Any], Tensor], output: Any, task: Task) -> None:
    """A :class:`SpecError` if the objective depends on weights other than through ``output``.

    Such are those of a model that was given as an object, of which a copy is trained: a penalty on them would be a
    constant.
    """
    if not all(one is None or isinstance(one, (Tensor, int, float, str)) for one in pytree.tree_leaves(output)):
        return
    try:
        found = loss(pytree.tree_map_only(Tensor, Tensor.detach, output))
    except Exception:  # it may differentiate the output by itself
        return
    if found.requires_grad:
        raise SpecError(
            f"task {task.label!r}: objective {function_name(task.objective)} reads weights other than through what the "
            "model returns; Weft trains a copy of the model and no other weights: let the model return what the loss "
            "needs, (logits, loss) for a penalty, or read them under torch.no_grad() if they are constant"
        )


def _named(task: Task) -> list[str]:
    own = [setting for setting in ("objective", "metric") if task.has_own(setting)]
    return [f"{setting} {function_name(getattr(task, setting))}" for setting in own]


def check_ranks(task: Task, mean_of_rows: bool, own_metric: bool, ranks: int) -> None:
    """A :class:`SpecError` for a loss or an update that rows on several ranks cannot share."""
    if ranks == 1:
        return
    what = "class_weights" if task.class_weights is not None else f"objective {function_name(task.objective)}"
    reasons = {
        what: not mean_of_rows,
        f"metric {function_name(task.metric)}": own_metric,
        f"optimizer {function_name(task.optimizer)}": task.has_own("optimizer"),
    }
    for name, refused in reasons.items():
        if refused:
            raise SpecError(
                f"task {task.label!r}: {name} needs all rows in one place; train it on one rank, not {ranks}"
            )
