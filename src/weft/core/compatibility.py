"""Decide whether tasks can share a step, and say why not: one answer for the planner and the runtime.

Tasks with equal *group keys* see the same graph, features, precision, objective and metric, and can be one group.
Tasks with equal *stack keys* have steps with the same operators, and can be one stack; what is left over are numbers
(rates, decays, seeds, epochs, patience), which a stack keeps per member.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

from weft.core.errors import SpecError
from weft.core.settings import identity
from weft.core.task import LATEST, Task, name_of

REGRESSIONS = ("mse", "mae", "huber")

GROUP_KEY_NAMES = ("graph", "feature_norm", "precision", "objective", "metric", "sampling", "update")

# A stack whose members differ in these trains them as well, but slower: it evaluates whenever one member does, and
# computes the first aggregation in every step. The planner keeps such tasks apart, the runtime does not refuse them.
ONLY_SLOWER = ("eval_every", "input_dropout")

# Settings that a stack keeps per member as numbers: another value needs neither another step nor other shapes.
MEMBER_NUMBERS = frozenset(
    {
        *("lr", "weight_decay", "dropout", "input_dropout", "attention_dropout", "betas", "eps", "momentum"),
        *("optimizer", "schedule", "warmup", "epochs", "patience", "clip_norm", "clip_value", "accumulate", "ema"),
        *("label_smoothing", "select", "seed", "name"),
    }
)


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
    return _by_name(task.graph)


def objective_name(task: Task, multilabel: bool, regression: bool = False) -> str:
    """The objective of ``task``: its own, or that of the graph's labels."""
    if task.objective != "auto":
        return function_name(task.objective)
    return "mse" if regression else "multilabel" if multilabel else "multiclass"


def metric_name(task: Task, multilabel: bool, regression: bool = False) -> str:
    """The metric of ``task``: its own, or accuracy (one class per node), micro F1 (many labels) or R2 (numbers)."""
    if task.metric != "auto":
        return function_name(task.metric)
    if regression or objective_name(task, multilabel) in REGRESSIONS:
        return "r2"
    return "f1_micro" if multilabel else "accuracy"


def columns_of(splits: Sequence[str], metric: str) -> list[str]:
    """The columns of a history: the loss of the training step, then losses and metrics of ``splits``."""
    return ["loss", *(f"{split}_loss" for split in splits), *(f"{split}_{metric}" for split in splits)]


def deciding_column(task: Task, metric: str, columns: Sequence[str]) -> int:
    """The index of the column that decides the best epoch of ``task``; -1: the latest evaluation is the best."""
    column = f"val_{metric}" if task.select is None else task.select
    if column in columns:
        return columns.index(column)
    if task.select in (None, LATEST):
        return -1
    raise SpecError(
        f"task {task.label!r}: select={task.select!r} is not measured; set it to one of {', '.join(columns)}, or to "
        f"{LATEST!r} for the latest evaluation"
    )


def function_name(value: Any) -> str:
    """The name of an objective or a metric: ``"file.py:focal"`` is called focal, as is a function or its partial."""
    while isinstance(value, partial):
        value = value.func
    return name_of(value).rpartition(":")[2]


def _by_name(value: Any) -> Hashable:
    """Equal for the same name and the same object."""
    return value if isinstance(value, str) else ById(value)


def group_key(task: Task, multilabel: bool) -> tuple[Hashable, ...]:
    """Equal for tasks that can be in one group, in the order of :data:`GROUP_KEY_NAMES`."""
    objective = _by_name(task.objective) if task.has_own("objective") else objective_name(task, multilabel)
    metric = _by_name(task.metric) if task.has_own("metric") else metric_name(task, multilabel)
    update = "torch" if task.has_own("optimizer") else "weft"
    return (graph_key(task), task.feature_norm, task.precision, objective, metric, sampling_key(task), update)


def sampling_key(task: Task) -> Hashable:
    """Equal for tasks that can train on the same batches: None on the whole graph."""
    return (task.fanouts, task.batch, task.batch_seed, task.split or 0) if task.sampled else None


def stack_key(task: Task) -> dict[str, Hashable]:
    """Equal for tasks whose steps have the same operators, apart from widths; by name, to say what differs."""
    traits, weft_update = task.traits, "sgd" if task.optimizer == "sgd" else "adam"  # Adam and AdamW are one update
    key: dict[str, Any] = {
        "optimizer": _by_name(task.optimizer) if task.has_own("optimizer") else weft_update,
        "decay": task.decay if task.weight_decay else "all",
        "eval_every": task.eval_every,
        "keep_top": task.keep_top,
        "model": _by_name(task.model),
    }
    key |= dict.fromkeys(loop_parts(task), True)
    if traits is None:  # its widths and rates are its own: whatever it is built with makes it another model
        key |= {name: getattr(task, name) for name in ("convert", *task.given_to_model())}
    else:
        key["input_dropout"] = bool(task.input_dropout)
        key |= {name: getattr(task, name) for name in ("layers", "norm", "residual", *traits.shaping)}
    return key | {f"model_args.{name}": identity(value) for name, value in task.model_args.items()}


def loop_parts(task: Task) -> list[str]:
    """Parts of a step that only some tasks have; their numbers may differ within a stack."""
    parts = {
        "param_groups": bool(task.param_groups),
        "clip_norm": task.clip_norm is not None,
        "clip_value": task.clip_value is not None,
        "accumulate": task.accumulate > 1,
        "ema": task.ema is not None,
        "plateau": task.schedule == "plateau",
        "callbacks": bool(task.callbacks),
        "class_weights": task.class_weights is not None,
    }
    return [name for name, is_there in parts.items() if is_there]


def alone_reason(task: Task) -> str | None:
    """Why ``task`` is never one of several in a stack; None if it may be."""
    if task.has_own("optimizer"):
        return f"{function_name(task.optimizer)} of torch updates the parameters of one task"
    return None


def eager_reason(task: Task) -> str | None:
    """Why the step of ``task`` is never captured as a CUDA graph; None if it may be."""
    if task.has_own("optimizer"):
        return f"{function_name(task.optimizer)} keeps numbers in Python, which a CUDA graph would not change"
    return None


def stack_obstacle(tasks: Sequence[Task], multilabel: bool) -> str | None:
    """Why ``tasks`` cannot be one stack, whatever it would cost; None if they can."""
    first = tasks[0]
    alone = alone_reason(first) if len(tasks) > 1 else None
    if alone is not None:
        return alone
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
