"""Say what a model does not read of a graph's edges, and refuse what it cannot do with them."""

from __future__ import annotations

import torch
from torch import nn

from weft.core.errors import SpecError
from weft.core.task import Task
from weft.graph.data.graph import Graph
from weft.runtime.user_modules.call_style import call_style, parameters_of


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
    return name in parameters_of(model) if call_style(model) == "edges" else None


def check_edges(task: Task, model: nn.Module, graph: Graph) -> None:
    """A :class:`SpecError` for a model that could not be given what the edges have, or cannot divide by it."""
    _check_degrees(task, graph)
    given = task.traits is None and (call_style(model) == "data" or reads_edges(task, model, "edge_attr"))
    if given and graph.edge_attr is not None and task.sampled:
        raise SpecError(
            f"task {task.label!r}: model {task.model_name} takes edge_attr, which sampled batches do not have; train "
            "it with mode='full'"
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
