"""From the name, path or object in a task to a graph that the task can be trained on."""

from __future__ import annotations

import torch

from weft.core.errors import GraphError, SpecError
from weft.core.task import Task
from weft.graph.catalog.names import load
from weft.graph.data.graph import Graph


def resolve_graph(task: Task, device: torch.device) -> Graph:
    """The graph of ``task``, checked for what training needs; a generated one is made on ``device``."""
    graph = task.graph if isinstance(task.graph, Graph) else find_graph(task, device)
    check_trainable(task, graph)
    return graph


def find_graph(task: Task, device: torch.device) -> Graph:
    """The graph that ``task.graph`` names."""
    if not isinstance(task.graph, str):
        raise SpecError(
            f"task {task.label!r}: graph={task.graph!r} must be a name, a path or a weft.Graph "
            "(see weft.Graph.from_pyg and from_edges)"
        )
    return load(task.graph, device=device)


def check_trainable(task: Task, graph: Graph) -> None:
    """A clear error unless ``graph`` has the features, labels and splits that ``task`` needs."""
    name = f"graph {graph.name!r}"
    if graph.x is None:
        raise GraphError(f"{name} has no features; give x [nodes, features], one-hot degrees for example")
    if graph.y is None:
        raise GraphError(f"{name} has no labels; give y: one class per node, or 0/1 [nodes, labels]")
    if not graph.train.numel():
        raise GraphError(
            f"{name} has no training nodes; give train=, or make a split: graph.random_split(train=0.6, val=0.2), "
            "in a shell `weft data convert IN OUT --split 0.6,0.2`"
        )
    if graph.num_classes < 2 and not graph.multilabel:
        raise GraphError(f"{name} has {graph.num_classes} class; training needs at least 2")
    if task.patience is not None and not graph.val.numel():
        raise SpecError(
            f"task {task.label!r}: patience={task.patience} needs validation nodes, but {name} has none; "
            "leave patience out or give val="
        )
