"""Result: the outcome of one training, in memory and on disk."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from weft.core.compatibility import objective_name
from weft.core.errors import GraphError, InputError, SpecError
from weft.core.files import write_json
from weft.core.graph_stats import GraphStats
from weft.core.plan import Plan
from weft.core.task import Task
from weft.core.wording import option
from weft.engine.errors import clear_errors
from weft.engine.graphs import HOST, find_graph
from weft.engine.machine import choose_device
from weft.graph.catalog import names as catalog
from weft.graph.check import as_ids, as_vector, check_range
from weft.graph.graph import Graph, as_graph, check_ids
from weft.graph.labels import SPLITS
from weft.runtime.checkpoint import save_atomically
from weft.runtime.modules.build import copy_module

# ---- Predict with a trained model, on the graph it was trained on or another. N nodes, M requested nodes, C classes.

Device = str | torch.device | None
OBJECT = "<"  # how the description of a graph or model begins that was given as an object


def graph_for(result: Result, graph: Any) -> Graph:
    """The graph to predict on, with the split that the task was trained on, if it has several."""
    found = own_graph(result) if graph is None else as_graph(graph) or catalog.load(graph)
    return with_own_split(result.task, found)


def with_own_split(task: Task, graph: Graph) -> Graph:
    """``graph`` with the split that ``task`` trains on, if it has several."""
    return graph.split(task.split) if isinstance(task.split, int) and task.split < graph.num_splits else graph


def own_graph(result: Result) -> Graph:
    """The graph that the task was trained on, loaded by its name; refused if it has changed since."""
    task = result.task
    graph = as_graph(task.graph)
    if graph is not None:
        return graph
    if task.graph.startswith(OBJECT):
        raise SpecError(
            f"task {task.label!r}: was trained on a graph that was given as an object, {task.graph}; give graph="
        )
    graph = find_graph(task, HOST)
    check_unchanged(task, result.trained_on, graph.stats(), "give it as graph= if that is meant")
    return graph


def check_unchanged(task: Task, trained_on: GraphStats | None, now: GraphStats, advice: str) -> None:
    """A :class:`SpecError` if the graph that ``task`` names was another when it was trained on."""
    if trained_on is not None and trained_on.fingerprint().digest != now.fingerprint().digest:
        raise SpecError(
            f"task {task.label!r}: graph {task.graph!r} had {trained_on.fingerprint().sizes} when it was trained on, "
            f"and has {now.fingerprint().sizes} now, or other degrees or splits; {advice}"
        )


def _check_fits(result: Result, model: nn.Module, graph: Graph) -> None:
    """Raise an error unless the model can read the graph."""
    trained, task = result.trained_on, result.task
    if graph.x is None:
        raise GraphError(f"graph {graph.name!r} has no features; give x [nodes, features]")
    if trained is None:
        return
    if graph.num_features != trained.num_features:
        raise GraphError(
            f"graph {graph.name!r} has {graph.num_features} features per node, and task {task.label!r} was trained on "
            f"{trained.num_features}"
        )
    relational = task.traits is not None and task.traits.relational
    if relational and not 0 < graph.num_relations <= trained.num_relations:
        raise GraphError(
            f"graph {graph.name!r} has {graph.num_relations} relations, and task {task.label!r} was trained on "
            f"{trained.num_relations}"
        )
    for name, layer in model.named_modules():  # layers of PyG that hold the edges of the graph they were trained on
        cached = (value for key, value in vars(layer).items() if key.startswith("_cached_"))
        if getattr(layer, "cached", False) is True and any(value is not None for value in cached):
            if trained.fingerprint().digest != graph.stats().fingerprint().digest:
                raise SpecError(
                    f"task {result.name!r}: {name} has cached=True and keeps the edges of the graph that it was "
                    f"trained on, which it would use for graph {graph.name!r} as well; train it with cached=False"
                )
            return


def nodes_of(nodes: Any, graph: Graph) -> Tensor:
    """Node ids ``[M]`` in the order of ``nodes``: ids, a mask ``[N]``, the name of a split, or None for all nodes.

    Ids are numbers; of a graph that has them (``graph.ids``) also a list of the user's own.
    """
    if nodes is None:
        return torch.arange(graph.num_nodes)
    if isinstance(nodes, str):
        if nodes not in SPLITS:
            raise SpecError(f"nodes={nodes!r}: must be node ids, a mask, or one of {', '.join(SPLITS)}")
        split: Tensor = getattr(graph, nodes)
        return split.cpu()
    if graph.ids is not None and isinstance(nodes, list) and nodes and all(isinstance(name, str) for name in nodes):
        rows = {name: row for row, name in enumerate(graph.ids.tolist())}
        unknown = next((name for name in nodes if name not in rows), None)
        if unknown is not None:
            raise GraphError(f"nodes: there is no {unknown!r} among the ids of graph {graph.name!r}")
        return torch.tensor([rows[name] for name in nodes])
    vector = as_vector(nodes, "nodes").cpu()
    if vector.dtype == torch.bool:
        if vector.numel() != graph.num_nodes:
            raise GraphError(f"the mask nodes= has {vector.numel()} entries but the graph has {graph.num_nodes} nodes")
        return vector.nonzero().squeeze(1)
    ids = as_ids(vector, "nodes").long()
    check_range(ids, graph.num_nodes, "nodes", f"nodes of graph {graph.name!r}")
    return ids


IO_ERROR = "Error while serializing: I/O error: "  # before what the system says, as safetensors words it
FORMAT = 1  # of result.json and sweep.json, and the files next to them
RESULT_FILES = RESULT, WEIGHTS, KEPT, TOP = "result.json", "model.safetensors", "kept.safetensors", "top.safetensors"
STATUSES = ("finished", "stopped", "diverged", "pruned", "cancelled", "preempted", "failed")  # stopped: early


@dataclass(frozen=True, eq=False)
class Top:
    """One of the best epochs of a training: its number (from 1), its value of the column that decides, its weights.

    ``weights`` are on the CPU, by the names of the model's ``state_dict``.
    """

    epoch: int
    score: float
    weights: dict[str, Tensor] = field(repr=False)


@dataclass(repr=False)
class Result:
    """A trained task.

    ``metrics``: loss and metric of every split at the best epoch (``train_accuracy``, ``val_accuracy``,
    ``test_accuracy``, ``val_loss``, ...), ``metric`` (its name), ``best_epoch``, ``epochs_run``, ``seconds`` and
    ``seconds_per_epoch``. ``history``: a list per column, one entry an epoch, NaN where not measured. ``model``: the
    module with its best weights, in evaluation mode, None if training could not begin. It takes a graph's own features,
    ``model(graph.x, graph.adj)``, and treats them as the training did. ``status``: one of :data:`STATUSES`.
    ``message``: what went wrong, where something did. ``trained_on``: a summary of the graph. ``dense_features``:
    whether sparse features were made dense for the model. ``model_code``: a digest of the file that the model was
    imported from. ``kept``: plain data of the module besides its weights. ``logged``: what callbacks logged, by name:
    pairs of the epoch (from 1) and the number. ``top``: of a task with ``keep_top`` its best epochs, the best first.
    """

    task: Task
    plan: Plan
    metrics: dict[str, Any]
    history: dict[str, list[float]]
    model: nn.Module | None
    environment: dict[str, Any]
    status: str = "finished"
    message: str = ""
    trained_on: GraphStats | None = None
    dense_features: bool = False
    model_code: str | None = None
    kept: dict[str, Tensor] = field(default_factory=dict)
    logged: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    top: list[Top] = field(default_factory=list)

    def __repr__(self) -> str:
        name = self.metrics.get("metric")
        scores = {split: self.metrics.get(f"{split}_{name}") for split in ("val", "test")}
        words = [f"{split} {name} {value:.4g}" for split, value in scores.items() if isinstance(value, float)]
        words.append(f"best epoch {self.metrics.get('best_epoch', 0)} of {self.metrics.get('epochs_run', 0)}")
        return f"<Result {self.name!r}: {self.status}, {', '.join(words)}>"

    def _repr_html_(self) -> str:
        from weft.engine.page import result_html

        return result_html(self)

    @property
    def name(self) -> str:
        """What the task is called."""
        return self.task.label

    def predict(
        self,
        graph: Any = None,
        nodes: Any = None,
        *,
        device: Device = None,
        layerwise: bool | None = None,
        fanout: Any = None,
        seed: int | None = None,
    ) -> Tensor:
        """Class numbers ``[M]`` of ``nodes``, or 0/1 ``[M, C]`` where a node may have several labels, on the CPU.

        ``graph``: the one it was trained on unless given; a :class:`weft.Graph`, a name or a path. ``nodes``: ids in
        any order, a mask, or the name of a split; all nodes unless given. ``device``: where to compute; where the model
        is, unless given. Features are treated as in training.

        With Weft's own models predictions of some nodes compute their neighbourhoods only, unless the whole graph costs
        less. ``layerwise``: the graph layer by layer in chunks of nodes, in bounded memory, or all at once (None:
        whichever costs less). ``fanout``: from sampled neighbours, so many per hop, drawn by ``seed`` (0 unless given).
        """
        options = {"device": device, "layerwise": layerwise, "fanout": fanout, "seed": seed}
        logits, kind = self.predict_logits(graph, nodes, **options), self._objective()
        # With an objective of the user's own the metric decides: Weft's accuracy takes the largest number as well.
        by_metric = self.task.has_own("objective") and self.metrics.get("metric") == "accuracy"
        if kind == "multiclass" or by_metric:
            return logits.argmax(1)
        return (logits > 0).long() if kind == "multilabel" else logits

    def predict_proba(self, graph: Any = None, nodes: Any = None, **options: Any) -> Tensor:
        """Probabilities ``[M, C]``; arguments as :meth:`predict`."""
        kind = self._objective()
        if kind not in ("multiclass", "multilabel"):
            raise SpecError(
                f"task {self.name!r}: objective={kind!r} has no probabilities; use predict or predict_logits"
            )
        logits = self.predict_logits(graph, nodes, **options)
        return logits.softmax(1) if kind == "multiclass" else logits.sigmoid()

    def model_at(self, rank: int) -> nn.Module:
        """A copy of :attr:`model` with the weights of ``top[rank - 1]``."""
        if self.model is None or isinstance(rank, bool) or not 1 <= rank <= len(self.top):
            have = f"from 1 to {len(self.top)}" if self.top else "and it keeps none: train it with keep_top=3, say"
            raise SpecError(f"task {self.name!r}: model_at({rank!r}) must be a rank of its best epochs, {have}")
        model = copy_module(self.model)[0]
        extra = {name: value for name, value in model.state_dict().items() if not isinstance(value, Tensor)}
        model.load_state_dict({**extra, **self.top[rank - 1].weights})
        return model

    def _objective(self) -> str:
        trained = own_graph(self).stats() if self.trained_on is None else self.trained_on
        return objective_name(self.task, trained.multilabel, trained.regression)

    def predict_logits(self, graph: Any = None, nodes: Any = None, **options: Any) -> Tensor:
        """What the model returns, ``[M, C]`` float32; arguments as :meth:`predict`."""
        return self._computed(graph, nodes, None, **options)

    def embed(self, graph: Any = None, nodes: Any = None, *, layer: int | str | None = None, **options: Any) -> Tensor:
        """What a hidden layer returns, ``[M, H]`` float32; other arguments as :meth:`predict`.

        ``layer``: of Weft's own models its number, from 1; of a module of your own the name of one of its parts. The
        last hidden layer unless given: what the last layer is given.
        """
        from weft.runtime.infer import LAST_HIDDEN

        return self._computed(graph, nodes, LAST_HIDDEN if layer is None else layer, **options)

    def _computed(
        self,
        graph: Any,
        nodes: Any,
        layer: int | str | None,
        device: Device = None,
        layerwise: bool | None = None,
        **samples: Any,
    ) -> Tensor:
        from weft.runtime.infer import Predictor  # samplers, which a run without batches does not need

        model = self.model
        if model is None:
            raise SpecError(f"task {self.name!r}: has no model to predict with; it {self.status}: {self.message}")
        target = graph_for(self, graph)
        check_ids(target)
        _check_fits(self, model, target)
        ids = nodes_of(nodes, target)
        if layerwise is not None and samples.get("fanout") is not None:
            raise SpecError(f"{option('layerwise', layerwise)} would have no effect with {option('fanout')}; give one")
        tensor = next(model.parameters(), None)
        here = HOST if tensor is None else tensor.device
        there = here if device is None else choose_device(device)
        if there != here:
            model = copy_module(model)[0].to(there)
        with clear_errors([self.task], there):
            predictor = Predictor(model, self.task, target, there, layerwise, restrict=layerwise is None)
            return predictor(ids, layer=layer, **samples)

    def export(self, to: str, out: str | os.PathLike[str] | None = None) -> Path:
        """Write the model for other libraries, with the treatment of its features inside; returns the file's path.

        ``to``: ``"pyg"`` (a module of PyG for ``torch.load``), ``"torch-export"`` (a ``.pt2`` program), ``"onnx"``, all
        called with ``(x, edge_index)``, or ``"safetensors"`` (weights and settings). ``out``: the file.
        """
        from weft.engine.export import export

        return export(self, to, out)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: everything but the weights."""
        return {
            "format": FORMAT,
            "status": self.status,
            **({"message": self.message} if self.message else {}),
            "task": self.task.to_dict(),
            "metrics": self.metrics,
            "environment": self.environment,
            "plan": self.plan.to_dict(),
            "history": self.history,
            **({"logged": self.logged} if self.logged else {}),
            **({} if self.trained_on is None else {"graph": self.trained_on.to_dict()}),
            **({"dense_features": True} if self.dense_features else {}),
            **({} if self.model_code is None else {"model_code": self.model_code}),
            **({"kept": KEPT} if self.kept else {}),
            **({"top": [{"epoch": best.epoch, "score": best.score} for best in self.top]} if self.top else {}),
        }

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the files of the result into ``folder`` (:data:`RESULT_FILES`), each in one piece."""
        try:
            return self.write(Path(folder))
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot write to {os.fspath(folder)}: {write_reason(error)}") from error

    def write(self, folder: Path) -> Path:
        """As :meth:`save`, with the system's own errors."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.model is not None:
            ranked = {f"{rank}.{key}": v for rank, best in enumerate(self.top, 1) for key, v in best.weights.items()}
            for name, tensors in {WEIGHTS: copied_weights(self.model), KEPT: self.kept, TOP: ranked}.items():
                if tensors:
                    save_atomically(folder / name, tensors, {"format": "pt"})
                else:
                    (folder / name).unlink(missing_ok=True)
        write_json(folder / RESULT, self.to_dict())
        return folder


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of ``model.state_dict()``; extra state is in another file.

    PyG's Linear lists ``weight`` and ``bias`` whatever it has: pruned or parametrized it gets what they are made of.
    """
    state = {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor)}
    for path, module in model.named_modules(remove_duplicate=False):
        tensors = {**module._parameters, **module._buffers}.items()
        passing = module._non_persistent_buffers_set
        held = {f"{path}.{k}".lstrip("."): v for k, v in tensors if v is not None and k not in passing}
        if not held.keys() <= state.keys() or is_parametrized(module):
            state = {key: value for key, value in state.items() if key.rpartition(".")[0] != path} | held
    return state


def copied_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of :func:`weights_of` on the CPU; tied parameters are written out: safetensors refuses shared memory."""
    return {key: value.detach().cpu().clone().contiguous() for key, value in weights_of(model).items()}


def check_format(data: Mapping[str, Any], file: Path) -> None:
    """Refuse a file that a later version of Weft wrote."""
    written = data.get("format", FORMAT)
    if not isinstance(written, int) or written > FORMAT:
        raise SpecError(f"{file}: has format {written!r}, and this version of Weft reads up to {FORMAT}; update Weft")


def write_reason(error: Exception) -> str:
    """Why something could not be written, without what libraries put around it."""
    return getattr(error, "strerror", None) or str(error).removeprefix(IO_ERROR).partition(" (os error")[0]


# ---- The code of a model: has its file changed since it was trained?


def model_code(task: Task) -> str | None:
    """A digest of the file behind ``"file.py:Net"`` or ``"package.module:Net"``; None for other models."""
    if not isinstance(task.model, str) or task.traits is not None:
        return None
    module = task.model.rpartition(":")[0]
    with suppress(ImportError, ValueError, AttributeError, OSError):
        spec = None if module.endswith(".py") else importlib.util.find_spec(module)
        file = module if spec is None else spec.origin
        return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    return None
