"""Inference: the logits of a trained model on a graph, by the same code that evaluates during training.

Shapes: N nodes of the graph, R nodes that are asked for, C classes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.core.errors import GraphError, SpecError
from weft.core.files import write_json
from weft.core.task import Task
from weft.engine.errors import clear_memory_errors
from weft.engine.graphs import Graphs, shared_store
from weft.engine.machine import choose_device, environment, machine_with
from weft.engine.memory_budget import memory_cap
from weft.engine.process_state import Needs, process_state
from weft.graph.graph import Graph
from weft.runtime.checkpoint import save_atomically
from weft.runtime.modules.settings import check_tasks
from weft.runtime.step.inputs import Inputs
from weft.runtime.step.stack import Stack

SPLITS = ("train", "val", "test")
Nodes = str | Sequence[int] | None
FILE = "predictions.safetensors"


@dataclass(frozen=True)
class Predictions:
    """Logits ``[R, C]`` of ``nodes [R]``, and ``metrics``: how many, how right where labels are known, how long."""

    task: Task
    nodes: Tensor
    logits: Tensor
    metrics: dict[str, Any]
    environment: dict[str, Any]

    def save(self, folder: Path) -> Path:
        """Write ``predictions.safetensors`` and ``result.json`` into ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        save_atomically(folder / FILE, {"nodes": self.nodes, "logits": self.logits}, {"format": "pt"})
        about = {"kind": "inference", "task": self.task.to_dict(), "environment": self.environment}
        write_json(folder / "result.json", {"status": "finished", **about, "metrics": self.metrics, "history": {}})
        return folder


def predict(
    task: Task, weights: str | Path, *, nodes: Nodes = None, device: str = "auto", budget: int | None = None
) -> Predictions:
    """The logits of the model of ``task`` with ``weights`` (a safetensors file) on its graph.

    ``nodes``: a split (``"test"``), ids, or None for all. Training settings of ``task`` are of no account.
    """
    there = choose_device(device)
    store = shared_store()
    fetched = None if store is None else store.take_weights(str(weights))
    tensors = read_weights(weights) if fetched is None else fetched
    names = [task.graph] if isinstance(task.graph, str) else []
    with clear_memory_errors([task.label], there), process_state(Needs.of([task], there, budget), there):
        check_tasks([task])
        graphs = Graphs(there, on_host=budget is not None, store=store)
        with memory_cap(there, machine_with(there), budget, store, names):
            graph = graphs.on_device(task)
            begin = time.perf_counter()
            rows = node_ids(nodes, graph)
            logits = logits_of(task, tensors, graph)[rows].float().cpu()
            seconds = time.perf_counter() - begin
    if store is not None:
        store.drop_weights(str(weights))
    metrics = {"nodes": len(rows), "seconds": seconds, **_right(logits, rows.cpu(), graph)}
    return Predictions(task, rows.cpu(), logits, metrics, environment(there))


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise SpecError(f"weights {Path(path).name}: cannot be read ({error})") from None


def logits_of(task: Task, tensors: Mapping[str, Tensor], graph: Graph) -> Tensor:
    """Logits ``[N, C]``; ``tensors`` are those of the model's ``state_dict``."""
    if graph.y is None:
        raise GraphError(f"graph {graph.name!r} has no labels, which say how many classes the model has; give y")
    stack = Stack([one_epoch(task)], Inputs(graph), first_once=not task.input_dropout, length=1)
    if stack.members.hidden_state is not None:
        raise SpecError(f"task {task.label!r}: model {task.model_name} keeps state that its weights do not have")
    with torch.no_grad():  # not before: a model of the user's own is tried with gradients when its stack is made
        _load(stack, tensors, task)
        return stack.source.logits(lambda batch: stack.infer(stack.state.flat, batch), stack.members.layers)[0]


def one_epoch(task: Task) -> Task:
    """The task with as little training as there can be, on the whole graph: what inference is built and planned by."""
    return task.with_values(epochs=1, warmup=0, patience=None, mode="full")


def _load(stack: Stack, tensors: Mapping[str, Tensor], task: Task) -> None:
    """Put ``tensors`` where the stack keeps weights and buffers; a :class:`SpecError` unless they are the model's."""
    layout, state = stack.members.layout, stack.state
    expected = dict(zip(layout.names, layout.shapes, strict=True))
    expected |= {name: buffer.shape[1:] for name, buffer in state.buffers.items()}
    frozen = {name: p for name, p in stack.members.model.named_parameters() if name not in expected}
    expected |= {name: p.shape for name, p in frozen.items()}
    for name, shape in expected.items():
        found = None if name not in tensors else list(tensors[name].shape)
        if found != list(shape):
            has = "lack it" if found is None else f"have {found}"
            raise SpecError(
                f"task {task.label!r}: model {task.model_name} on graph {stack.graph.name!r} has {name} "
                f"{list(shape)}, and the weights {has}; give the settings and the graph that they were trained with"
            )
    state.flat[0] = layout.flatten(tensors).to(stack.device)
    for name, buffer in state.buffers.items():
        buffer[0] = tensors[name].to(buffer)
    for name, parameter in frozen.items():
        parameter.copy_(tensors[name])


def node_ids(nodes: Nodes, graph: Graph) -> Tensor:
    """The ids ``[R]`` of the nodes that are asked for."""
    if nodes is None or nodes == "all":
        return torch.arange(graph.num_nodes, device=graph.device)
    if isinstance(nodes, str):
        found = getattr(graph, nodes) if nodes in SPLITS else None
        if found is None:
            raise SpecError(f"nodes={nodes!r} must be all, one of the graph's splits ({', '.join(SPLITS)}), or ids")
        return torch.as_tensor(found, device=graph.device)
    wrong = next((node for node in nodes if not 0 <= node < graph.num_nodes), None)
    if wrong is not None:
        raise SpecError(f"nodes: {wrong} is not a node of graph {graph.name!r}, which has {graph.num_nodes:,}")
    return torch.tensor(list(nodes), dtype=torch.int64, device=graph.device)


def _right(logits: Tensor, rows: Tensor, graph: Graph) -> dict[str, Any]:
    """The share of the nodes whose class is as labelled, of a graph with one class per node."""
    if graph.multilabel or graph.regression or graph.y is None or not len(rows):
        return {}
    labels = graph.y.cpu()[rows]
    known = labels >= 0
    right = (logits.argmax(1) == labels)[known].double()
    return {"accuracy": float(right.mean())} if len(right) else {}
