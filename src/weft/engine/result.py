"""Result: the outcome of one training, in memory and on disk."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from weft.core.compatibility import objective_name
from weft.core.errors import GraphError, InputError, SpecError
from weft.core.files import write_json
from weft.core.graph_stats import GraphStats
from weft.core.plan import Plan
from weft.core.settings import ARGS, Labels, identity, lower_is_better
from weft.core.sweep import REPEATS, setting_of
from weft.core.task import Task
from weft.engine.errors import clear_memory_errors, clear_model_errors
from weft.engine.graphs import HOST, find_graph
from weft.engine.machine import choose_device
from weft.graph.catalog import names as catalog
from weft.graph.check import as_ids, as_vector, check_range
from weft.graph.graph import Graph
from weft.graph.labels import SPLITS
from weft.graph.verify import check_ids
from weft.runtime.checkpoint import save_atomically
from weft.runtime.modules.copying import copy_module

if TYPE_CHECKING:
    from weft.engine.sweep_result import SweepResult


# ---- Predict with a trained model: on the graph it was trained on or another one, with its training's own treatment.
#
# Shapes: N nodes, M requested nodes, C classes.

if TYPE_CHECKING:
    pass

OBJECT = "<"  # how the description of a graph or model begins that was given as an object


def predicted_logits(
    result: Result, graph: Any, nodes: Any, device: str | torch.device | None, layerwise: bool | None
) -> Tensor:
    """What the model returns for ``nodes [M]``, ``[M, C]`` float32 on the CPU; see :meth:`Result.predict`."""
    from weft.runtime.infer import infer_logits  # samplers, which a run without batches does not need

    if result.model is None:
        raise SpecError(f"task {result.name!r}: has no model to predict with; it {result.status}: {result.message}")
    found = graph_for(result, graph)
    check_ids(found)
    _check_fits(result, found)
    _check_cached(result.model, result, found)
    chosen = nodes_of(nodes, found)
    target = _device_of(result.model) if device is None else choose_device(device)
    model = _on_device(result.model, target)
    with clear_memory_errors([result.name], target), clear_model_errors([result.task]):
        return infer_logits(model, result.task, found, chosen, target, layerwise)


def classes_of(result: Result, logits: Tensor) -> Tensor:
    """Class numbers ``[M]``, 0/1 ``[M, C]`` if a node may have several labels, else what the model returns.

    With an objective of the user's own the metric tells: one of Weft's for classes takes the largest number as well.
    """
    kind = _objective(result)
    if kind == "multiclass" or (result.task.has_own("objective") and result.metrics.get("metric") == "accuracy"):
        return logits.argmax(1)
    return (logits > 0).long() if kind == "multilabel" else logits


def probabilities_of(result: Result, logits: Tensor) -> Tensor:
    """Probabilities ``[M, C]`` of classes, or of every label by itself."""
    kind = _objective(result)
    if kind not in ("multiclass", "multilabel"):
        raise SpecError(f"task {result.name!r}: objective={kind!r} has no probabilities; use predict or predict_logits")
    return logits.softmax(1) if kind == "multiclass" else logits.sigmoid()


def graph_for(result: Result, graph: Any) -> Graph:
    """The graph to predict on, with the split that the task was trained on, if it has several."""
    found, number = own_graph(result) if graph is None else _graph(graph), result.task.split
    return found.split(number) if isinstance(number, int) and number < found.num_splits else found


def own_graph(result: Result) -> Graph:
    """The graph that the task was trained on, found again by its name; refused if it is another one by now."""
    task = result.task
    if isinstance(task.graph, Graph):
        return task.graph
    if task.graph.startswith(OBJECT):
        raise SpecError(
            f"task {task.label!r}: was trained on a graph that was given as an object, {task.graph}; give graph="
        )
    found = find_graph(task, HOST)
    before, now = result.trained_on, found.stats().fingerprint()
    if before is not None and before.fingerprint().digest != now.digest:
        raise SpecError(
            f"task {task.label!r}: graph {task.graph!r} had {before.fingerprint().sizes} when it was trained on, and "
            f"has {now.sizes} now, or other degrees or splits; give it as graph= if that is meant"
        )
    return found


def _graph(graph: Any) -> Graph:
    if isinstance(graph, Graph):
        return graph
    if isinstance(graph, (str, os.PathLike)):
        return catalog.load(graph)
    raise SpecError(
        f"graph={type(graph).__name__}: must be a weft.Graph, a name or a path (see weft.Graph.from_pyg and from_edges)"
    )


def _check_fits(result: Result, graph: Graph) -> None:
    """A clear error unless the model can read the graph."""
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
    if task.traits is not None and task.traits.relational:
        _check_relations(task, graph, trained.num_relations)


def _check_cached(model: nn.Module, result: Result, graph: Graph) -> None:
    """A clear error if a layer of PyG keeps the edges of the graph that it was trained on, and this is another one."""
    trained = result.trained_on
    layers = [name for name, layer in model.named_modules() if _keeps_edges(layer)]
    if layers and trained is not None and trained.fingerprint().digest != graph.stats().fingerprint().digest:
        raise SpecError(
            f"task {result.name!r}: {layers[0]} has cached=True and keeps the edges of the graph that it was trained "
            f"on, which it would use for graph {graph.name!r} as well; train it with cached=False"
        )


def _keeps_edges(layer: nn.Module) -> bool:
    kept = (value for name, value in vars(layer).items() if name.startswith("_cached_"))
    return getattr(layer, "cached", False) is True and any(value is not None for value in kept)


def _check_relations(task: Task, graph: Graph, trained: int) -> None:
    if not 0 < graph.num_relations <= trained:
        raise GraphError(
            f"graph {graph.name!r} has {graph.num_relations} relations, and task {task.label!r} was trained on "
            f"{trained}"
        )


def nodes_of(nodes: Any, graph: Graph) -> Tensor:
    """Node ids ``[M]`` in the order given: ids, a mask ``[N]``, the name of a split, or None for all nodes."""
    if nodes is None:
        return torch.arange(graph.num_nodes)
    if isinstance(nodes, str):
        if nodes not in SPLITS:
            raise SpecError(f"nodes={nodes!r}: must be node ids, a mask, or one of {', '.join(SPLITS)}")
        found: Tensor = getattr(graph, nodes)
        return found.cpu()
    given = as_vector(nodes, "nodes").cpu()
    if given.dtype == torch.bool:
        if given.numel() != graph.num_nodes:
            raise GraphError(f"the mask nodes= has {given.numel()} entries but the graph has {graph.num_nodes} nodes")
        return given.nonzero().squeeze(1)
    ids = as_ids(given, "nodes").long()
    check_range(ids, graph.num_nodes, "nodes")
    return ids


def _objective(result: Result) -> str:
    trained = own_graph(result).stats() if result.trained_on is None else result.trained_on
    return objective_name(result.task, trained.multilabel, trained.regression)


def _device_of(model: nn.Module) -> torch.device:
    tensor = next(model.parameters(), None)
    return HOST if tensor is None else tensor.device


def _on_device(model: nn.Module, device: torch.device) -> nn.Module:
    """``model`` itself, or a copy of it on another device."""
    return model if _device_of(model) == device else copy_module(model)[0].to(device)


# ---- SettingsScore: what settings scored over their seeds, mean and deviation; runs that were pruned are counted
# apart.


@dataclass(frozen=True)
class SettingsScore:
    """One choice of settings: ``mean`` and ``deviation`` of ``metric`` over members that differ in seed and split.

    ``deviation`` is the standard deviation, None of one member. ``test_mean``, ``test_deviation``: of the test nodes,
    at the same epochs. ``splits``: how many splits of the graph the members have. ``pruned``: members
    that were ended early and count for nothing here, unless all were.
    """

    name: str
    settings: dict[str, Any]
    members: tuple[str, ...]
    metric: str
    mean: float
    deviation: float | None
    test_mean: float | None = None
    test_deviation: float | None = None
    pruned: int = 0
    splits: int = 1

    def __str__(self) -> str:
        seeds = f" over {self.repeats}" if len(self.members) > 1 else ""
        words = f"{self.metric.replace('_', ' ')} {plus_minus(self.mean, self.deviation)}"
        if self.test_mean is not None:
            words += f", test {plus_minus(self.test_mean, self.test_deviation)}"
        return f"{self.name} ({words}{seeds})"

    @property
    def repeats(self) -> str:
        """What the mean is over: ``"3 seeds"``, ``"10 splits"``, ``"10 splits x 3 seeds"``."""
        seeds, rest = divmod(len(self.members), self.splits)
        if self.splits == 1:
            return f"{seeds} seeds"
        if rest:
            return f"{len(self.members)} runs on {self.splits} splits"
        return f"{self.splits} splits" if seeds == 1 else f"{self.splits} splits x {seeds} seeds"

    def to_dict(self) -> dict[str, Any]:
        """A flat row, for a table."""
        scores = {f"{self.metric}_mean": self.mean, f"{self.metric}_deviation": self.deviation}
        tests = {"test_mean": self.test_mean, "test_deviation": self.test_deviation}
        return {**self.settings, **scores, **tests, "members": len(self.members), "pruned": self.pruned}


def plus_minus(mean: float, deviation: float | None) -> str:
    """``0.812 ± 0.004``."""
    return f"{mean:.3f}" if deviation is None else f"{mean:.3f} ± {deviation:.3f}"


def settings_scores(result: SweepResult, metric: str) -> list[SettingsScore]:
    """Every choice of settings that has a score, best first; all members are on one graph."""
    keys = [key for key in result.sweep.varying if key not in REPEATS]
    labels = Labels({key: [setting_of(member.task, key) for member in result.tasks] for key in result.sweep.varying})
    alike: dict[tuple[Any, ...], list[Result]] = {}
    for member in result.tasks:
        alike.setdefault(tuple(identity(setting_of(member.task, key)) for key in keys), []).append(member)
    found = [_score(members, metric, keys, labels) for members in alike.values()]
    sign = 1.0 if lower_is_better(metric) else -1.0
    return sorted((one for one in found if one is not None), key=lambda one: sign * one.mean)


def _score(members: Sequence[Result], metric: str, keys: Sequence[str], labels: Labels) -> SettingsScore | None:
    whole = [member for member in members if member.status != "pruned"]
    counted = [member for member in whole or members if _number(member, metric) is not None]
    if not counted:
        return None
    task = counted[0].task
    described = {key: setting_of(task, key) for key in keys}
    test = "test_" + metric.partition("_")[2]
    return SettingsScore(
        labels.name(described, keys) or (task.label if len(members) == 1 else task.model_name),
        {key.removeprefix(ARGS): value for key, value in described.items()},
        tuple(member.name for member in counted),
        metric,
        *_mean(_number(member, metric) for member in counted),
        *(_mean(_number(member, test) for member in counted) if test != metric else (None, None)),
        pruned=len(members) - len(whole),
        splits=len({member.task.split for member in counted}),
    )


def _number(member: Result, metric: str) -> float | None:
    value = member.metrics.get(metric)
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if number else None


def _mean(values: Iterable[float | None]) -> tuple[Any, float | None]:
    known = [value for value in values if value is not None]
    return (fmean(known) if known else None), (stdev(known) if len(known) > 1 else None)


# ---- Results as HTML, for notebooks: small tables that need no style of their own.

MOST_ROWS = 30


def result_html(result: Result) -> str:
    """One training: how it ended, and every split at the best epoch."""
    metrics, name = result.metrics, str(result.metrics.get("metric", ""))
    rows = [
        (split, _number_cell(metrics.get(f"{split}_{name}")), _number_cell(metrics.get(f"{split}_loss")))
        for split in ("train", "val", "test")
        if f"{split}_{name}" in metrics
    ]
    ran = f"best epoch {metrics.get('best_epoch', 0)} of {metrics.get('epochs_run', 0)} run, "
    ran += f"{metrics.get('seconds', 0.0):.1f} s"
    message = f"<p>{escape(result.message)}</p>" if result.message else ""
    heading = f"<p><b>{escape(result.name)}</b>: {escape(result.status)}, {ran}</p>"
    return heading + message + html_table(("split", name.replace("_", " "), "loss"), rows)


def sweep_html(result: SweepResult) -> str:
    """A sweep: how its members ended, and the settings of every graph with their scores over seeds."""
    ends = ", ".join(f"{count} {status}" for status, count in result.statuses.items())
    heading = f"<p><b>{escape(result.sweep.label)}</b>: {len(result)} tasks, {escape(ends)}; {result.seconds:.1f} s</p>"
    parts = result.by_graph()
    return heading + "".join(_graph_html(part, graph if len(parts) > 1 else "") for graph, part in parts.items())


def _graph_html(result: SweepResult, graph: str) -> str:
    found = result.settings_table()
    rows = [
        (rank, one.name, plus_minus(one.mean, one.deviation), _mean_cell(one.test_mean, one.test_deviation),
         one.repeats if one.splits > 1 else len(one.members), one.pruned or "")
        for rank, one in enumerate(found[:MOST_ROWS], 1)
    ]  # fmt: skip
    more = f"<p>... and {len(found) - MOST_ROWS} more</p>" if len(found) > MOST_ROWS else ""
    heading = f"<p>{escape(graph)}</p>" if graph else ""
    columns = (
        "",
        "settings",
        result.metric.replace("_", " "),
        "test",
        "over" if any(one.splits > 1 for one in found) else "seeds",
        "pruned",
    )
    return heading + html_table(columns, rows) + more


def html_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table of plain cells."""
    heads = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _number_cell(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "–"


def _mean_cell(mean: float | None, deviation: float | None) -> str:
    return "–" if mean is None else plus_minus(mean, deviation)


IO_ERROR = "Error while serializing: I/O error: "  # before what the system says, as safetensors words it
RESULT_FILES = RESULT, WEIGHTS, KEPT = "result.json", "model.safetensors", "kept.safetensors"
STATUSES = (  # stopped: early, out of patience
    *("finished", "stopped", "diverged", "pruned", "cancelled", "preempted", "failed"),
)


@dataclass(repr=False)
class Result:
    """A trained task.

    ``metrics``: loss and metric of every split at the best epoch (``train_accuracy``, ``val_accuracy``,
    ``test_accuracy``, ``val_loss``, ...), ``metric`` (its name), ``best_epoch``, ``epochs_run``, ``seconds``
    and ``seconds_per_epoch``. ``history``: a list per column, one entry an epoch, NaN where not measured.
    ``model``: the module with its best weights, in evaluation mode, None if training could not begin.
    It takes a graph's own features, ``model(graph.x, graph.adj)``, and treats them as the training did.
    ``status``: one of :data:`STATUSES`. ``message``: what went wrong, where something did. ``trained_on``: a summary of
    the graph. ``dense_features``: whether sparse features were made dense for the model. ``model_code``: a
    digest of the file that the model was imported from. ``kept``: what the module keeps in Python beside its weights.
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

    def __repr__(self) -> str:
        name = self.metrics.get("metric")
        scores = {split: self.metrics.get(f"{split}_{name}") for split in ("val", "test")}
        words = [f"{split} {name} {value:.4g}" for split, value in scores.items() if isinstance(value, float)]
        words.append(f"best epoch {self.metrics.get('best_epoch', 0)} of {self.metrics.get('epochs_run', 0)}")
        return f"<Result {self.name!r}: {self.status}, {', '.join(words)}>"

    def _repr_html_(self) -> str:
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
        device: str | torch.device | None = None,
        layerwise: bool | None = None,
    ) -> Tensor:
        """Class numbers ``[M]`` of ``nodes``, or 0/1 ``[M, C]`` where a node may have several labels, on the CPU.

        ``graph``: the one it was trained on unless given; a :class:`weft.Graph`, a name or a path. ``nodes``: ids in
        any order, a mask, or the name of a split; all nodes unless given. ``device``: where to compute; where the model
        is, unless given. ``layerwise``: layer by layer in chunks of nodes, in bounded memory, for Weft's own models;
        None: if the graph is large. Features are treated as in training.
        """
        return classes_of(self, self.predict_logits(graph, nodes, device=device, layerwise=layerwise))

    def predict_proba(
        self,
        graph: Any = None,
        nodes: Any = None,
        *,
        device: str | torch.device | None = None,
        layerwise: bool | None = None,
    ) -> Tensor:
        """Probabilities ``[M, C]``; arguments as :meth:`predict`."""
        return probabilities_of(self, self.predict_logits(graph, nodes, device=device, layerwise=layerwise))

    def predict_logits(
        self,
        graph: Any = None,
        nodes: Any = None,
        *,
        device: str | torch.device | None = None,
        layerwise: bool | None = None,
    ) -> Tensor:
        """What the model returns, ``[M, C]`` float32; arguments as :meth:`predict`."""
        return predicted_logits(self, graph, nodes, device, layerwise)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: everything but the weights."""
        return {
            "status": self.status,
            **({"message": self.message} if self.message else {}),
            "task": self.task.to_dict(),
            "metrics": self.metrics,
            "environment": self.environment,
            "plan": self.plan.to_dict(),
            "history": self.history,
            **({} if self.trained_on is None else {"graph": self.trained_on.to_dict()}),
            **({"dense_features": True} if self.dense_features else {}),
            **({} if self.model_code is None else {"model_code": self.model_code}),
            **({"kept": KEPT} if self.kept else {}),
        }

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the files of the result into ``folder`` (:data:`RESULT_FILES`), each in one piece."""
        with write_errors(folder):
            return self.write(Path(folder))

    def write(self, folder: Path) -> Path:
        """As :meth:`save`, with the system's own errors."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.model is not None:
            save_atomically(folder / WEIGHTS, _own_tensors(self.model), {"format": "pt"})
            (folder / KEPT).unlink(missing_ok=True)
            if self.kept:
                save_atomically(folder / KEPT, self.kept, {"format": "pt"})
        write_json(folder / RESULT, self.to_dict())
        return folder


@contextmanager
def write_errors(folder: str | os.PathLike[str]) -> Iterator[None]:
    """A folder that cannot be written to is one sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write to {os.fspath(folder)}: {write_reason(error)}") from error


def write_reason(error: Exception) -> str:
    """Why something could not be written, without what libraries put around it."""
    return getattr(error, "strerror", None) or str(error).removeprefix(IO_ERROR).partition(" (os error")[0]


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict on the CPU, with tied parameters written out (safetensors refuses shared memory).

    Extra state that is no tensor is in the file of the module's state.
    """
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}


# ---- Tell whether the file that a task's model is imported from has changed since it was trained.


def model_code(task: Task) -> str | None:
    """A digest of the file behind ``"file.py:Net"`` or ``"package.module:Net"``; None for other models."""
    if not isinstance(task.model, str) or task.traits is not None:
        return None
    file = _file_of(task.model.rpartition(":")[0])
    with suppress(OSError):
        return None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return None


def _file_of(place: str) -> Path | None:
    if place.endswith(".py"):
        return Path(place)
    with suppress(ImportError, ValueError, AttributeError):
        found = importlib.util.find_spec(place)
        return None if found is None or found.origin is None else Path(found.origin)
    return None


def check_same_code(task: Task, trained: str | None, place: Path) -> None:
    """Refuse a model whose file is another one by now; ``trained``: its digest then, None: not known."""
    now = model_code(task)
    if trained is not None and now is not None and now != trained:
        raise SpecError(
            f"{place}: {task.model.rpartition(':')[0]} has changed since {task.label!r} was trained; bring it back, or "
            f"give the model yourself if it is still the same: load_result(folder, model=...)"
        )
