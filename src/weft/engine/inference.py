"""Inference of a task from a file of weights: once for a queue, or again and again by a model that stays loaded.

Shapes: N nodes of the graph, R requested nodes, C classes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from weft.core.compatibility import objective_name
from weft.core.errors import GraphError, SpecError
from weft.core.files import write_json
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.task import SAMPLING_SETTINGS, Task
from weft.engine.errors import clear_errors
from weft.engine.graphs import HOST, Graphs, shared_store
from weft.engine.machine import choose_device, environment, machine_with
from weft.engine.memory import memory_cap
from weft.engine.process_state import Needs, process_state
from weft.engine.result import FORMAT, RESULT, check_unchanged, model_code, nodes_of, weights_of, with_own_split
from weft.graph.graph import Graph
from weft.runtime.checkpoint import save_atomically
from weft.runtime.device.process import same_draws
from weft.runtime.infer import EDGE_BYTES, WHOLE_BYTES, Predictor
from weft.runtime.modules.build import as_written, build_model
from weft.runtime.modules.settings import check_tasks
from weft.runtime.step.inputs import Inputs
from weft.runtime.step.stack import Stack

Nodes = str | Sequence[int] | None
LEAST_EDGES = 1 << 18  # of a chunk of nodes, where the whole graph does not fit
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


@contextmanager
def loaded(
    task: Task,
    weights: str | Path,
    device: str = "auto",
    budget: int | None = None,
    layerwise: bool = False,
    keep: bool = False,
) -> Iterator[Predictor]:
    """The model of ``task`` with ``weights`` (a safetensors file) and its graph, ready on the device inside.

    ``budget``: bytes that all of it may take; ``layerwise``: it is too little for the whole graph, which stays on the
    host. ``keep``: several requests follow.
    """
    there = choose_device(device)
    store = shared_store()
    tensors = read_weights(weights)
    names = [task.graph] if isinstance(task.graph, str) else []
    with process_state(Needs.of([task], there, budget), there):
        check_tasks([task])
        # Errors inside of the cap: they say what it is.
        with memory_cap(there, machine_with(there), budget, store, names), clear_errors([task], there, models=False):
            on_host = layerwise and there.type != "cpu"
            graphs = Graphs(HOST if on_host else there, on_host=budget is not None, store=None if on_host else store)
            graph = graphs.on_device(task)
            _check_as_trained(task, Path(weights).with_name(RESULT), graphs.true_stats(task))
            model = model_with(task, tensors, graph).to(there)
            room = WHOLE_BYTES if budget is None else budget
            yield Predictor(model, task, graph, there, layerwise, room=room, keep=keep)


def predict(
    task: Task,
    weights: str | Path,
    *,
    nodes: Nodes = None,
    device: str = "auto",
    budget: int | None = None,
    layerwise: bool = False,
) -> Predictions:
    """The logits of the model of ``task`` with ``weights`` (a safetensors file) on its graph.

    ``nodes``: a split (``"test"``), ids, or None for all. Training settings of ``task`` are ignored.
    """
    with loaded(task, weights, device, budget, layerwise) as predictor:
        begin, graph = time.perf_counter(), with_own_split(task, predictor.graph)
        rows = nodes_of(None if isinstance(nodes, str) and nodes == "all" else nodes, graph)
        logits = predictor(rows)
        seconds = time.perf_counter() - begin
    metrics = {"nodes": len(rows), "seconds": seconds}
    if graph.y is not None and len(rows) and not graph.multilabel and not graph.regression:
        labels = graph.y.cpu()[rows]
        right = (logits.argmax(1) == labels)[labels >= 0].double()
        metrics |= {"accuracy": float(right.mean())} if len(right) else {}
    return Predictions(task, rows, logits, metrics, environment(predictor.device))


def answer(predictor: Predictor, nodes: Sequence[int], fanout: Any = None, seed: int | None = None) -> dict[str, Any]:
    """What the model says of ``nodes``, as plain data: logits, and if it tells classes these and probabilities."""
    graph, task = predictor.graph, predictor.task
    logits = predictor(nodes_of(nodes, graph), fanout=fanout, seed=seed)
    kind = objective_name(task, graph.multilabel, graph.regression)
    found = {"nodes": list(nodes), "logits": logits.tolist(), "computed": predictor.computed}
    if kind == "multiclass":
        found |= {"classes": logits.argmax(1).tolist(), "probabilities": logits.softmax(1).tolist()}
    elif kind == "multilabel":
        found |= {"classes": (logits > 0).long().tolist(), "probabilities": logits.sigmoid().tolist()}
    return found


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise SpecError(f"weights {Path(path).name}: cannot be read ({error})") from None


def _check_as_trained(task: Task, result: Path, now: GraphStats) -> None:
    """A :class:`SpecError` if graph or code of ``task`` was another when the training wrote ``result`` (a file)."""
    try:
        trained = json.loads(result.read_text(encoding="utf-8"))
        graph, model = trained["task"]["graph"], trained["task"]["model"]
        before = None if "graph" not in trained else GraphStats.from_dict(trained["graph"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return  # weights by themselves
    if graph == task.graph:
        check_unchanged(task, before, now, "give it another name or path and infer for that")
    code = trained.get("model_code")
    if model == task.model and code is not None and model_code(task) not in (None, code):
        raise SpecError(f"task {task.label!r}: {model} has changed since it was trained; bring it back or train again")


def model_with(task: Task, tensors: Mapping[str, Tensor], graph: Graph) -> nn.Module:
    """The model of ``task`` for ``graph`` with ``tensors``, those of its ``state_dict``, in evaluation mode.

    A :class:`SpecError` unless they are the model's, and for a module that keeps state besides them.
    """
    if graph.y is None:
        raise GraphError(f"graph {graph.name!r} has no labels, which say how many classes the model has; give y")
    if task.traits is None:  # the stack of a user's module is tried when it is made
        findings = Stack([one_epoch(task)], Inputs(graph), length=1).members.findings
        if findings.hidden_state is not None:
            raise SpecError(f"task {task.label!r}: model {task.model_name} keeps state that its weights do not have")
    with same_draws(HOST):
        model = as_written(build_model(task, graph.num_features, graph.num_classes, graph.num_relations))
    expected = weights_of(model)
    for name, value in expected.items():
        there = list(tensors[name].shape) if name in tensors else None
        if there is None or not (is_lazy(value) or there == list(value.shape)):
            has = "lack it" if there is None else f"have {there}"
            shape = "" if is_lazy(value) else list(value.shape)
            raise SpecError(
                f"task {task.label!r}: model {task.model_name} on graph {graph.name!r} has {name} {shape}, and the "
                f"weights {has}; give the settings and the graph that they were trained with"
            )
    model.load_state_dict({name: tensors[name] for name in expected}, strict=False)
    return model.eval()


def layered_bytes(task: Task, stats: GraphStats, machine: Machine) -> int:
    """What inference layer by layer takes of a device: chunks of :data:`LEAST_EDGES` edges, and the logits.

    A processor has the graph besides, and the activations of two layers.
    """
    width = max(stats.num_features, task.hidden, stats.num_classes)
    chunk = LEAST_EDGES * (8 * width + EDGE_BYTES) + 8 * stats.num_nodes * stats.num_classes
    graph = 4 * stats.num_nodes * (stats.num_features + 2 * width) + 8 * stats.num_edges
    return machine.context_bytes + chunk + (0 if machine.device == "cuda" else graph)


def one_epoch(task: Task) -> Task:
    """The task with as little training as possible, on the whole graph: inference is planned by it."""
    whole = {name: getattr(task, name) for name in task.given if name not in SAMPLING_SETTINGS}
    none = dict.fromkeys(("patience", "select", "keep_top"))
    return Task(**{**whole, **none, "epochs": 1, "warmup": 0, "mode": "full"})
