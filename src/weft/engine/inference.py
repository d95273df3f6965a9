"""Inference: the logits of a trained model on a graph, by the same code that evaluates during training.

Shapes: N nodes of the graph, R requested nodes, C classes.
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
from weft.engine.errors import clear_errors
from weft.engine.graphs import Graphs, shared_store
from weft.engine.machine import choose_device, environment, machine_with
from weft.engine.memory import memory_cap
from weft.engine.process_state import Needs, process_state
from weft.engine.result import FORMAT, nodes_of
from weft.graph.graph import Graph
from weft.runtime.checkpoint import save_atomically
from weft.runtime.modules.settings import check_tasks
from weft.runtime.step.inputs import Inputs
from weft.runtime.step.stack import Stack

Nodes = str | Sequence[int] | None
FILE = "predictions.safetensors"


@dataclass(frozen=True)
class Predictions:
    """Logits ``[R, C]`` of ``nodes [R]``, and ``metrics``: their number, accuracy where labels are known, seconds."""

    task: Task
    nodes: Tensor
    logits: Tensor
    metrics: dict[str, Any]
    environment: dict[str, Any]

    def save(self, folder: Path) -> Path:
        """Write ``predictions.safetensors`` and ``result.json`` into ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        save_atomically(folder / FILE, {"nodes": self.nodes, "logits": self.logits}, {"format": "pt"})
        result = {
            "format": FORMAT,
            "status": "finished",
            "kind": "inference",
            "task": self.task.to_dict(),
            "environment": self.environment,
            "metrics": self.metrics,
            "history": {},
        }
        write_json(folder / "result.json", result)
        return folder


def predict(
    task: Task, weights: str | Path, *, nodes: Nodes = None, device: str = "auto", budget: int | None = None
) -> Predictions:
    """The logits of the model of ``task`` with ``weights`` (a safetensors file) on its graph.

    ``nodes``: a split (``"test"``), ids, or None for all. Training settings of ``task`` are ignored.
    """
    there = choose_device(device)
    store = shared_store()
    tensors = read_weights(weights)
    names = [task.graph] if isinstance(task.graph, str) else []
    with clear_errors([task], there, models=False), process_state(Needs.of([task], there, budget), there):
        check_tasks([task])
        graphs = Graphs(there, on_host=budget is not None, store=store)
        with memory_cap(there, machine_with(there), budget, store, names):
            graph = graphs.on_device(task)
            begin = time.perf_counter()
            rows = nodes_of(None if isinstance(nodes, str) and nodes == "all" else nodes, graph)
            logits = logits_of(task, tensors, graph)[rows.to(there)].float().cpu()
            seconds = time.perf_counter() - begin
    metrics = {"nodes": len(rows), "seconds": seconds}
    if graph.y is not None and len(rows) and not graph.multilabel and not graph.regression:
        labels = graph.y.cpu()[rows]
        right = (logits.argmax(1) == labels)[labels >= 0].double()
        metrics |= {"accuracy": float(right.mean())} if len(right) else {}
    return Predictions(task, rows, logits, metrics, environment(there))


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
    if stack.members.findings.hidden_state is not None:
        raise SpecError(f"task {task.label!r}: model {task.model_name} keeps state that its weights do not have")
    with torch.no_grad():  # not before: the stack of a user's module is tried with gradients when it is made
        _load(stack, tensors, task)
        return stack.source.logits(lambda batch: stack.infer(stack.state.flat, batch), stack.members.layers)[0]


def one_epoch(task: Task) -> Task:
    """The task with as little training as possible, on the whole graph: inference is built and planned by it."""
    return task.with_values(epochs=1, warmup=0, patience=None, mode="full")


def _load(stack: Stack, tensors: Mapping[str, Tensor], task: Task) -> None:
    """Copy ``tensors`` into the weights and buffers of the stack; a :class:`SpecError` unless they are the model's."""
    layout, state = stack.members.layout, stack.state
    expected = dict(zip(layout.names, layout.shapes, strict=True))
    expected |= {name: buffer.shape[1:] for name, buffer in state.buffers.items()}
    frozen = {name: p for name, p in stack.members.model.named_parameters() if name not in expected}
    expected |= {name: p.shape for name, p in frozen.items()}
    for name, shape in expected.items():
        there = list(tensors[name].shape) if name in tensors else None
        if there != list(shape):
            has = "lack it" if there is None else f"have {there}"
            raise SpecError(
                f"task {task.label!r}: model {task.model_name} on graph {stack.graph.name!r} has {name} "
                f"{list(shape)}, and the weights {has}; give the settings and the graph that they were trained with"
            )
    state.flat[0] = layout.flatten(tensors).to(stack.device)
    for name, buffer in state.buffers.items():
        buffer[0] = tensors[name].to(buffer)
    for name, parameter in frozen.items():
        parameter.copy_(tensors[name])
