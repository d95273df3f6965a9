"""load_result: the result of a run or a sweep from its folder, in any process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from weft.core.errors import InputError, SpecError
from weft.core.graph_stats import GraphStats
from weft.core.plan import Plan
from weft.core.settings import Described
from weft.core.sweep import Sweep
from weft.core.task import OWN_FUNCTIONS, Task
from weft.engine.result import KEPT, OBJECT, RESULT, WEIGHTS, Result, check_same_code, own_graph
from weft.engine.sweep_result import SweepResult, folder_names
from weft.runtime.device.process import same_draws
from weft.runtime.modules.build import build_model
from weft.runtime.modules.settings import check_tasks
from weft.runtime.modules.state import EXTRA, ModuleState, restore_state
from weft.runtime.trained_inputs import treat_inputs

OF_MEMBERS = ("tasks", "metric", "best")  # what a summary says of a graph's members, beside its size


def load_result(folder: str | os.PathLike[str], *, model: Any = None, graph: Any = None) -> Result | SweepResult:
    """The result that a run or a sweep left in ``folder``: metrics, histories, and models with their best weights.

    A model is built as it was for its training: by name, or out of the ``"file.py:Net"`` that the task had. ``model``:
    the class, the function or the module of a task that was given an object; if there were several, a dict from their
    names. ``graph``: in the same way the graph, which is needed to predict on it only. What a module of your own keeps
    outside of its parameters and buffers, numbers, texts and tensors, is as it was with its best weights.
    """
    place = Path(folder)
    data = _read(place / RESULT)
    given = {"model": model, "graph": graph}
    try:
        if "sweep" in data:
            return _sweep(place, data, given)
        return LoadedResult.of(place, data, given)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SpecError(f"{place / RESULT}: lacks or garbles an entry: {error}") from None


class LoadedResult(Result):
    """A :class:`Result` out of a folder; its weights are read when the model is first asked for."""

    _place: Path | None = None
    _checked = True  # that the model's file is still the same
    _built: nn.Module | None = None

    @classmethod
    def of(cls, place: Path, data: Mapping[str, Any], given: Mapping[str, Any]) -> LoadedResult:
        """The result in the folder ``place``, whose file holds ``data``."""
        task, trained = _task(data["task"], given, place), data.get("graph")
        result = cls(
            task,
            Plan.from_dict(data["plan"]),
            data["metrics"],
            {key: [float("nan") if one is None else one for one in column] for key, column in data["history"].items()},
            None,
            data["environment"],
            data["status"],
            data.get("message", ""),
            None if trained is None else GraphStats.from_dict(trained),
            data.get("dense_features", False),
            data.get("model_code"),
        )
        result.kept = _loaded(place / KEPT) if "kept" in data else {}
        result._place = place if (place / WEIGHTS).is_file() else None
        result._checked = given["model"] is None
        return result

    @property
    def model(self) -> nn.Module | None:  # type: ignore[override]
        """The module with its best weights, in evaluation mode; None if the run left none."""
        if self._built is None and self._place is not None:
            self._built = self._build(self._place)
        return self._built

    @model.setter
    def model(self, model: nn.Module | None) -> None:
        self._built = model

    def _build(self, place: Path) -> nn.Module:
        task = self.task
        if self._checked:
            check_same_code(task, self.model_code, place)
        check_tasks([task])
        trained = own_graph(self).stats() if self.trained_on is None else self.trained_on
        with same_draws(torch.device("cpu")):
            model = build_model(task, trained.num_features, trained.num_classes, trained.num_relations)
        state = ModuleState.from_tensors(self.kept)
        if not state.evaluates:
            raise SpecError(
                f"task {task.label!r}: model {task.model_name} keeps {state.unsaved!r} between calls, which is not "
                "plain data and in no file, and its predictions depend on it: predict in the process that trained it, "
                "or return it from get_extra_state and take it back in set_extra_state"
            )
        _restore(model, task, state, place / KEPT)  # first: calls may have made buffers that weights are for
        _fill(model, task, place / WEIGHTS)
        return treat_inputs(model, task, dense=self.dense_features).eval()


def _loaded(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise SpecError(f"{file}: cannot be read ({error})") from None


def _fill(model: nn.Module, task: Task, file: Path) -> None:
    """Load the weights; refuse those of another model."""
    weights: dict[str, Any] = dict(_loaded(file))
    declared = {name: value for name, value in model.state_dict().items() if name.endswith(EXTRA)}
    weights = {**declared, **weights}  # which is restored already
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        what = lines[1] if len(lines) > 1 else lines[0]
        raise SpecError(f"{file}: holds the weights of another {task.model_name} than there is now: {what}") from None


def _restore(model: nn.Module, task: Task, state: ModuleState, file: Path) -> None:
    """Give the module its plain data; refuse that of another model."""
    try:
        restore_state(model, state, exact=False)
    except (AttributeError, IndexError, KeyError, RuntimeError, SpecError, TypeError, ValueError) as error:
        raise SpecError(f"{file}: does not fit the {task.model_name} that there is now: {error}") from None


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        kind = "is no folder of a run" if file.parent.is_dir() else "does not exist"
        raise SpecError(f"{file.parent}: {kind} (there is no {RESULT}); a run writes one when it ends")
    try:
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"{file}: cannot be read ({error})") from None
    return data


def _task(data: Mapping[str, Any], given: Mapping[str, Any], place: Path) -> Task:
    """The task that was trained, with what it was given as objects."""
    data, label = dict(data), data.get("name") or data["model"]
    if not _is_object(data["model"]) and given["model"] is not None:
        if not isinstance(given["model"], Mapping):
            data["model"] = given["model"]
    elif _is_object(described := data["model"]):
        data["model"] = _chosen(given["model"], data["model"])
        if data["model"] is None:
            raise SpecError(
                f"{place}: task {label!r} was trained with a model that was given as an object; give it again: "
                f"load_result(folder, model={described.strip('<>')})"
            )
    data |= {name: _described(data[name]) for name in OWN_FUNCTIONS if name in data}
    data["callbacks"] = [{**one, "call": _described(one["call"])} for one in data.get("callbacks", ())]
    if _is_object(data["graph"]):
        data["graph"] = _chosen(given["graph"], data["graph"]) or data["graph"]
    try:
        return Task.from_dict(data)
    except InputError as error:
        raise SpecError(f"{place / RESULT}: {error}") from None


def _described(value: Any) -> Any:
    """A function that was given as an object has its name only; its results need no more."""
    return Described(value.strip("<>")) if _is_object(value) else value


def _is_object(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(OBJECT)


def _chosen(given: Any, described: str) -> Any:
    """What was given for an object that is called ``<Net>``."""
    return given.get(described.strip("<>")) if isinstance(given, Mapping) else given


# ---- sweeps ------------------------------------------------------------------------------------------


def _sweep(place: Path, data: Mapping[str, Any], given: Mapping[str, Any]) -> SweepResult:
    names = [row["name"] for row in data["tasks"]]
    folders = [place / "tasks" / name for name in folder_names(names)]
    members = [LoadedResult.of(folder, _read(folder / RESULT), given) for folder in folders]
    sweep = _same_sweep(data["sweep"], members)
    plans = tuple(Plan.from_dict(plan) for plan in data["plan"])
    about = data["graphs"] if isinstance(data.get("graphs"), dict) else {}
    sizes = [{key: value for key, value in one.items() if key not in OF_MEMBERS} for one in about.values()]
    graphs = dict(zip(sweep.graphs, sizes, strict=False))
    return SweepResult(sweep, list(members), plans, data["environment"], data["seconds"], graphs)


def _same_sweep(described: Mapping[str, Any], members: Sequence[Result]) -> Sweep:
    """The sweep as it was written, if names say everything of it; else one with the same members."""
    tasks = [member.task for member in members]
    objects = any(not isinstance(thing, str) or _is_object(thing) for t in tasks for thing in (t.graph, t.model))
    if not objects:
        try:
            sweep = Sweep.from_dict(described)
        except InputError:
            sweep = None
        if sweep is not None and [task.to_dict() for task in sweep] == [task.to_dict() for task in tasks]:
            return sweep
    return Sweep.from_tasks(tasks, described.get("name"))
