"""Checks of members' models before they are one stack: what Weft cannot train, and what several cannot share."""

from __future__ import annotations

import torch
from torch import nn

from weft.core.errors import SpecError
from weft.core.task import Task
from weft.graph.data.graph import Graph
from weft.nn.norm import BatchNorm
from weft.runtime.batches.source import Source
from weft.runtime.step.members.slot import CannotStack
from weft.runtime.user_modules.attributes import unequal
from weft.runtime.user_modules.call_style import check_call
from weft.runtime.user_modules.kept.shared_memory import followers, shared_weights


def check_users_modules(task: Task, models: list[nn.Module], graph: Graph) -> None:
    """Refuse what cannot be trained as written; :class:`CannotStack` for what cannot be stacked."""
    adj = graph.adj
    had = {"edge_weight": adj.weight, "edge_type": adj.relation, "edge_attr": adj.edge_attr}
    check_call(task, models[0], tuple(name for name, value in had.items() if value is not None))
    _check_dtypes(task, models[0])
    _check_memory(task, models[0])
    if len(models) > 1:
        _check_followers(models[0])
        _check_attributes(models)
        _check_hooks(models)


def _check_dtypes(task: Task, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.complex64):
            kind = str(parameter.dtype).removeprefix("torch.")
            raise SpecError(
                f"task {task.label!r}: parameter {name} of model {task.model_name} is {kind}; Weft keeps weights "
                "in float32: call .float() on the model, and choose the arithmetic by precision="
            )


def _check_memory(task: Task, model: nn.Module) -> None:
    found = None if any(p.is_meta for p in model.parameters()) else shared_weights(model)
    if found is not None:
        raise SpecError(
            f"task {task.label!r}: {found[1]} of model {task.model_name} is in the memory of the parameter {found[0]}, "
            "so that an update of one would change the other; let it be the same parameter, or a .clone() of it"
        )


def _check_followers(model: nn.Module) -> None:
    """What is in the memory of a weight would be in that of one member's."""
    for one in followers(model, dict((*model.named_parameters(), *model.named_buffers()))):
        raise CannotStack(f"{one.name} is in the memory of {one.owner}, which every member has one of")


def _check_attributes(models: list[nn.Module]) -> None:
    """Attributes of a user's modules are shared by all members, so they must be equal."""
    for other in models[1:]:
        name = unequal(models[0], other)
        if name is not None:
            raise CannotStack(f"their modules differ in {name!r}, which is neither a parameter nor a buffer")


def _check_hooks(models: list[nn.Module]) -> None:
    for name, parameter in models[0].named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CannotStack(f"{name} has a hook on its gradient")


def check_frozen(models: list[nn.Module]) -> None:
    """Frozen parameters are shared by all members, so they must be equal."""
    frozen = [{name: p for name, p in model.named_parameters() if not p.requires_grad} for model in models]
    for others in frozen[1:]:
        if any(not value.is_meta and not torch.equal(frozen[0][name], value) for name, value in others.items()):
            raise CannotStack("parameters that do not train differ among them")


def check_norms(task: Task, model: nn.Module, source: Source) -> None:
    """A batch that ranks share has some nodes on several of them: a norm over rows would count those twice."""
    shared = source.reduce.ranks > 1 and not source.constant
    if shared and any(isinstance(module, BatchNorm) for module in model.modules()):
        raise SpecError(
            f"task {task.label!r}: a batch norm does not go with sampled training over ranks, which share "
            "the nodes of a batch; use norm='layer', or one rank"
        )


def check_relations(task: Task, graph: Graph) -> None:
    """A :class:`SpecError` if a relational model meets a graph without relations."""
    if task.traits is not None and task.traits.relational and not graph.num_relations:
        raise SpecError(
            f"task {task.label!r}: {task.model} needs relations, and the edges of graph {graph.name!r} have none; "
            "give the graph relation=, one number per edge, or choose another model"
        )


def empty_relations(task: Task, graph: Graph) -> list[str]:
    """A remark on relations without edges, if the model has weights for them."""
    if task.traits is None or not task.traits.relational:
        return []
    empty = [str(relation) for relation, edges in enumerate(graph.stats().relation_edges) if not edges]
    if not empty:
        return []
    shown = ", ".join(empty[:8]) + (f" and {len(empty) - 8} more" if len(empty) > 8 else "")
    return [f"no edge of graph {graph.name!r} has relation {shown}: what {task.model} keeps for it does not train"]
