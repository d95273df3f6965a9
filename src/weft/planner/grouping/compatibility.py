"""What tasks must have in common to share a step: their treatment (a group) and their structure (a stack).

A *treatment* is what the whole group sees once: the graph, the features as they are fed, the precision, the
objective and the metric. A *structure* is everything that changes which operators a step has; what is left over
are numbers (rates, decays, seeds, epochs, patience), which a stack keeps one of for every task.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from weft.core.graph_stats import GraphStats
from weft.core.task import MODELS, Task

ATTENTION = ("gat", "gatv2")

GROUP_KEY_NAMES = ("graph", "feature_norm", "precision", "objective", "metric")


class ById:
    """An object as a key: equal to itself alone. It is held, so that no other object can take its id."""

    __slots__ = ("thing",)

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


def graph_key(task: Task) -> Hashable:
    """Which graph a task is on: its name or path, or the object itself."""
    return task.graph if isinstance(task.graph, str) else ById(task.graph)


def group_key(task: Task, stats: GraphStats) -> tuple[Hashable, ...]:
    """Equal for tasks that can be in one group, in the order of :data:`GROUP_KEY_NAMES`."""
    objective = task.objective if task.objective != "auto" else ("multilabel" if stats.multilabel else "multiclass")
    metric = task.metric if task.metric != "auto" else ("f1_micro" if stats.multilabel else "accuracy")
    return (graph_key(task), task.feature_norm, task.precision, objective, metric)


def structure(task: Task) -> dict[str, Any]:
    """Equal for tasks whose steps have the same operators, save for widths; by name, to say what differs."""
    found: dict[str, Any] = {
        "optimizer": "sgd" if task.optimizer == "sgd" else "adam",  # Adam and AdamW are one update
        "decay": task.decay if task.weight_decay else "all",
        "eval_every": task.eval_every,
    }
    if task.model not in MODELS:
        return {"model": task.model if isinstance(task.model, str) else ById(task.model), **found}
    found |= {"model": task.model, "layers": task.layers, "norm": task.norm, "residual": task.residual}
    found["input_dropout"] = bool(task.input_dropout)
    if task.model in ATTENTION:
        found |= {"heads": task.heads, "out_heads": task.out_heads}
    if task.model == "sage":
        found["aggregator"] = task.aggregator
    return found


def width(task: Task) -> int:
    """What zero padding can equalise: the hidden width, where the model has one (0: it has none)."""
    return task.hidden if task.model in MODELS and task.layers > 1 else 0


def padding_obstacle(task: Task) -> str | None:
    """Why a width of this task cannot be padded with zeros; None where it can."""
    if task.model not in MODELS:
        return f"{task.model_name} is a model of its own: its widths are not Weft's to change"
    if task.norm == "layer":
        return "layer norm takes its mean over the whole width, and zeros would move it"
    return None
