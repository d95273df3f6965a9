"""Decide whether tasks can share a step, and say why not: one answer for the planner and the runtime.

Tasks with equal *group keys* see the same graph, features, precision, objective and metric, and can be one group.
Tasks with equal *stack keys* have steps with the same operators, and can be one stack; what is left over are numbers
(rates, decays, seeds, epochs, patience), which a stack keeps per member.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from weft.core.settings.value_names import identity
from weft.core.task import Task

GROUP_KEY_NAMES = ("graph", "feature_norm", "precision", "objective", "metric", "sampling")

# A stack whose members differ in these trains them as well, but slower: it evaluates whenever one member does, and
# computes the first aggregation in every step. The planner keeps such tasks apart, the runtime does not refuse them.
ONLY_SLOWER = ("eval_every", "input_dropout")


class ById:
    """An object as a key: equal to itself alone. It is held, so that no other object can take its id."""

    __slots__ = ("thing",)

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)

    def __repr__(self) -> str:
        return str(getattr(self.thing, "__name__", type(self.thing).__name__))


def graph_key(task: Task) -> Hashable:
    """Which graph a task is on: its name or path, or the object itself."""
    return task.graph if isinstance(task.graph, str) else ById(task.graph)


def objective_name(task: Task, multilabel: bool) -> str:
    """The objective of ``task``: its own, or that of the graph's labels."""
    return task.objective if task.objective != "auto" else ("multilabel" if multilabel else "multiclass")


def metric_name(task: Task, multilabel: bool) -> str:
    """The metric of ``task``: its own, or accuracy (one class per node) or micro F1 (many labels)."""
    return task.metric if task.metric != "auto" else ("f1_micro" if multilabel else "accuracy")


def group_key(task: Task, multilabel: bool) -> tuple[Hashable, ...]:
    """Equal for tasks that can be in one group, in the order of :data:`GROUP_KEY_NAMES`."""
    named = (objective_name(task, multilabel), metric_name(task, multilabel))
    return (graph_key(task), task.feature_norm, task.precision, *named, sampling_key(task))


def sampling_key(task: Task) -> Hashable:
    """Equal for tasks that can train on the same batches: None on the whole graph."""
    return (task.fanouts, task.batch, task.batch_seed, task.split or 0) if task.sampled else None


def stack_key(task: Task) -> dict[str, Hashable]:
    """Equal for tasks whose steps have the same operators, apart from widths; by name, to say what differs."""
    traits = task.traits
    found: dict[str, Any] = {
        "optimizer": "sgd" if task.optimizer == "sgd" else "adam",  # Adam and AdamW are one update
        "decay": task.decay if task.weight_decay else "all",
        "eval_every": task.eval_every,
        "model": task.model if isinstance(task.model, str) else ById(task.model),
    }
    if traits is None:  # its widths and rates are its own: whatever it is built with makes it another model
        found |= {name: getattr(task, name) for name in ("convert", *task.given_to_model())}
    else:
        found["input_dropout"] = bool(task.input_dropout)
        found |= {name: getattr(task, name) for name in ("layers", "norm", "residual", *traits.shaping)}
    return found | {f"model_args.{name}": identity(value) for name, value in task.model_args.items()}


def stack_obstacle(tasks: Sequence[Task], multilabel: bool) -> str | None:
    """Why ``tasks`` cannot be one stack, whatever it would cost; None if they can."""
    first = tasks[0]
    for task in tasks[1:]:
        pairs = zip(GROUP_KEY_NAMES, group_key(first, multilabel), group_key(task, multilabel), strict=True)
        mine, other = stack_key(first), stack_key(task)
        names = [name for name in {**mine, **other} if name not in (*ONLY_SLOWER, "decay")]
        for name, one, two in (*pairs, *((name, mine.get(name), other.get(name)) for name in names)):
            if one != two:
                return f"they differ in {name} ({one!r} and {two!r})"
    if len({task.decay for task in tasks if task.weight_decay}) > 1:
        return "weight decay reaches all layers of some, and the first layer alone of others"
    return None


def width(task: Task) -> int:
    """What zero padding can equalise: the hidden width, where the model has one (0: it has none)."""
    return task.hidden if task.traits is not None and task.layers > 1 else 0


def padding_obstacle(task: Task) -> str | None:
    """Why a width of this task cannot be padded with zeros; None if it can."""
    traits = task.traits
    if traits is None:
        return f"{task.model_name} is a model of its own: its widths are not Weft's to change"
    if traits.padding:
        return traits.padding
    if traits.relational and task.blocks is not None:
        return "blocks are equal parts of the width, and zeros would move them"
    if task.norm == "layer":
        return "layer norm takes its mean over the whole width, and zeros would move it"
    return None
