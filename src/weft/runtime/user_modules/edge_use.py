"""Say what a model does not read of a graph's edges, and refuse what it cannot do with them.

A model that takes ``edge_index`` is given ``edge_weight``, ``edge_type`` and ``edge_attr`` if its ``forward`` has
parameters of these names.
"""

from __future__ import annotations

import inspect

import torch
from torch import nn

from weft.core.errors import SpecError
from weft.core.task import Task
from weft.graph.data.graph import Graph

EDGE_ARRAYS = {"edge_weight": "edge_weight=", "edge_attr": "edge_attr=", "edge_type": "relation="}


def unread_edges(task: Task, model: nn.Module, graph: Graph) -> list[str]:
    """Remarks on weights and features of edges that the graph has and the model does not read."""
    notes = []
    reads_weight = reads_edges(task, model, "edge_weight")
    if graph.edge_weight is not None and reads_weight is False:
        notes.append(f"{task.model_name} does not read the edge weights of graph {graph.name!r}")
    same = graph.edge_attr is not None and graph.edge_attr.numel() == graph.num_edges and graph.edge_weight is not None
    if graph.edge_attr is not None and reads_edges(task, model, "edge_attr") is False and not (same and reads_weight):
        notes.append(f"{task.model_name} does not read the edge features of graph {graph.name!r}")
    return notes


def reads_edges(task: Task, model: nn.Module, name: str) -> bool | None:
    """Whether the model reads ``edge_weight`` or ``edge_attr``; None if nothing says so."""
    if task.traits is not None:
        return task.traits.weighted if name == "edge_weight" else False
    names = list(inspect.signature(model.forward).parameters)
    return name in names if names[1:2] == ["edge_index"] else None


def check_edges(task: Task, model: nn.Module, graph: Graph) -> None:
    """A :class:`SpecError` for a model that needs what the edges do not have, or that could not be given it."""
    if task.traits is not None:
        _check_degrees(task, graph)
        return
    parameters = inspect.signature(model.forward).parameters
    held = {"edge_weight": graph.edge_weight, "edge_attr": graph.edge_attr, "edge_type": graph.relation}
    for name in held.keys() & parameters.keys() if list(parameters)[1:2] == ["edge_index"] else ():
        if held[name] is None and parameters[name].default is inspect.Parameter.empty:
            raise SpecError(
                f"task {task.label!r}: model {task.model_name} needs {name}, and graph {graph.name!r} has none; give "
                f"the graph {EDGE_ARRAYS[name]}, or the parameter a default"
            )
        if name == "edge_attr" and held[name] is not None and task.sampled:
            raise SpecError(
                f"task {task.label!r}: model {task.model_name} takes edge_attr, which sampled batches do not have; "
                "train it with mode='full'"
            )


def _check_degrees(task: Task, graph: Graph) -> None:
    """GCN divides by square roots of weighted degrees."""
    weight = graph.edge_weight
    if task.model != "gcn" or weight is None or weight.is_meta or not bool((weight < 0).any()):
        return
    rows, loops = graph.adj.rows().long(), graph.adj.rows() == graph.adj.indices
    degree = torch.ones(graph.num_nodes, dtype=weight.dtype, device=weight.device)
    degree[rows[loops]] = 0.0
    degree.index_add_(0, rows, weight)
    if bool((degree < 0).any()):
        node = int((degree < 0).nonzero()[0])
        raise SpecError(
            f"task {task.label!r}: the weights of the edges into node {node} of graph {graph.name!r} sum to "
            f"{float(degree[node]):.4g} with its self loop; GCN divides by the square root of that: use weights that "
            "are not negative, or another model"
        )
