"""``weft.read``: a result, a plan or a spec from its folder or file, in any process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from weft.core.errors import InputError, SpecError
from weft.core.graph_stats import GraphStats
from weft.core.plan import Plan
from weft.core.settings import FunctionRef
from weft.core.spec_file import read_spec
from weft.core.sweep import Sweep
from weft.core.task import OWN_FUNCTIONS, Task
from weft.engine.result import KEPT, OBJECT, RESULT, TOP, WEIGHTS, Result, Top, check_format, model_code, own_graph
from weft.engine.sweep_result import SweepResult, folder_names
from weft.planner.report.plan_report import PlanReport
from weft.runtime.device.process import same_draws
from weft.runtime.infer import treat_inputs
from weft.runtime.modules.build import as_written, build_model
from weft.runtime.modules.settings import check_tasks
from weft.runtime.modules.state import EXTRA, ModuleState, restore_state

OF_MEMBERS = ("tasks", "metric", "best", "best_settings")  # in the summary of a graph: of its members, not its size


def read(
    path: str | os.PathLike[str], *, overrides: Iterable[str] = (), model: Any = None, graph: Any = None
) -> Result | SweepResult | PlanReport | Task | Sweep:
    """What is at ``path``: the result of a run (its folder), a plan (``.json``), or a task or sweep (a ``.toml`` spec).

    A result has metrics, histories, and models with their best weights. A model is built as it was for its training:
    by name, or out of the ``"file.py:Net"`` that the task had. ``model``: the class, the function or the module of a
    task that was given an object; if there were several, a dict from their names. ``graph``: in the same way the
    graph, which is needed to predict on it only. What a module of your own keeps outside of its parameters and
    buffers, numbers, texts and tensors, is as it was with its best weights.

    A plan is what ``weft plan --out FILE.json`` wrote, for :func:`weft.run`. ``overrides`` change settings of a spec:
    ``["train.lr=0.02"]``.
    """
    source, changes = Path(path), tuple(overrides)
    if source.name == RESULT or (source.suffix not in (".json", ".toml") and not os.path.isfile(source)):
        kind, unread = "result", {"overrides": changes or None}
    else:
        kind, unread = "plan" if source.suffix == ".json" else "spec", {"model": model, "graph": graph}
        unread |= {"overrides": changes or None} if kind == "plan" else {}
    for name, value in unread.items():
        if value is not None:
            raise SpecError(f"weft.read({str(source)!r}): {name}= has no effect on a {kind}; leave it out")
    if kind == "result":
        return read_result(source.parent if source.name == RESULT else source, model, graph)
    return read_spec(source, changes) if kind == "spec" else read_plan(source)


def read_plan(path: Path) -> PlanReport:
    """The plan in a file; raises :class:`SpecError` for one that is damaged or was changed."""
    if not os.path.isfile(path):
        raise SpecError(f"plan {str(path)!r}: no such file; `weft plan SPEC --out FILE` writes one")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"plan {str(path)!r}: cannot be read ({error})") from None
    return PlanReport.from_json(text, str(path))


def read_result(path: Path, model: Any = None, graph: Any = None) -> Result | SweepResult:
    """The result that a run or a sweep left in the folder ``path``."""
    data = _read(path / RESULT)
    objects = {"model": model, "graph": graph}
    try:
        return _sweep(path, data, objects) if "sweep" in data else LoadedResult.of(path, data, objects)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SpecError(f"{path / RESULT}: lacks or garbles an entry: {error}") from None


class LoadedResult(Result):
    """A :class:`Result` out of a folder; its weights are read when the model is first used."""

    _folder: Path | None = None
    _checked = True  # that the model's file is still the same
    _built: nn.Module | None = None

    @classmethod
    def of(cls, folder: Path, data: Mapping[str, Any], objects: Mapping[str, Any]) -> LoadedResult:
        """The result in ``folder``, whose file holds ``data``; ``objects``: model and graph, if they were objects."""
        trained, nan = data.get("graph"), float("nan")
        result = cls(
            _task(data["task"], objects, folder),
            Plan.from_dict(data["plan"]),
            data["metrics"],
            {key: [nan if value is None else value for value in column] for key, column in data["history"].items()},
            None,
            data["environment"],
            data["status"],
            data.get("message", ""),
            None if trained is None else GraphStats.from_dict(trained),
            data.get("dense_features", False),
            data.get("model_code"),
        )
        result.kept = _loaded(folder / KEPT) if "kept" in data else {}
        logged = data.get("logged", {}).items()
        result.logged = {key: [(epoch, nan if v is None else v) for epoch, v in pairs] for key, pairs in logged}
        ranked = _loaded(folder / TOP) if "top" in data else {}
        for rank, best in enumerate(data.get("top", ()), 1):
            start, score = f"{rank}.", nan if best["score"] is None else best["score"]
            weights = {key.removeprefix(start): value for key, value in ranked.items() if key.startswith(start)}
            result.top.append(Top(best["epoch"], score, weights))
        result._folder = folder if (folder / WEIGHTS).is_file() else None
        result._checked = objects["model"] is None
        return result

    @property
    def model(self) -> nn.Module | None:  # type: ignore[override]
        """The module with its best weights, in evaluation mode; None if the run left none."""
        if self._built is None and self._folder is not None:
            self._built = self._build(self._folder)
        return self._built

    @model.setter
    def model(self, model: nn.Module | None) -> None:
        self._built = model

    def _build(self, folder: Path) -> nn.Module:
        task = self.task
        now = model_code(task) if self._checked and self.model_code is not None else None
        if now is not None and now != self.model_code:
            raise SpecError(
                f"{folder}: {task.model.rpartition(':')[0]} has changed since {task.label!r} was trained; bring it "
                "back, or give the model yourself if it is still the same: weft.read(folder, model=...)"
            )
        check_tasks([task])
        trained = own_graph(self).stats() if self.trained_on is None else self.trained_on
        with same_draws(torch.device("cpu")):
            model = as_written(build_model(task, trained.num_features, trained.num_classes, trained.num_relations))
        state = ModuleState.from_tensors(self.kept)
        if not state.evaluates:
            raise SpecError(
                f"task {task.label!r}: model {task.model_name} keeps {state.unsaved!r} between calls, which is not "
                "plain data and in no file, and its predictions depend on it: predict in the process that trained it, "
                "or return it from get_extra_state and take it back in set_extra_state"
            )
        try:  # first: calls may have made buffers that weights are for
            restore_state(model, state, exact=False)
        except (AttributeError, IndexError, KeyError, RuntimeError, SpecError, TypeError, ValueError) as error:
            raise SpecError(f"{folder / KEPT}: does not fit the {task.model_name} that there is now: {error}") from None
        weights = _loaded(folder / WEIGHTS)
        declared = {name: value for name, value in model.state_dict().items() if name.endswith(EXTRA)}  # restored above
        try:
            model.load_state_dict({**declared, **weights})
        except RuntimeError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            what = lines[1] if len(lines) > 1 else lines[0]
            raise SpecError(
                f"{folder / WEIGHTS}: holds the weights of another {task.model_name} than there is now: {what}"
            ) from None
        return treat_inputs(model, task, dense=self.dense_features).eval()


def _loaded(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise SpecError(f"{file}: cannot be read ({error})") from None


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        kind = "is no folder of a run" if file.parent.is_dir() else "does not exist"
        raise SpecError(f"{file.parent}: {kind} (there is no {RESULT}); a run writes one when it ends")
    try:
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"{file}: cannot be read ({error})") from None
    check_format(data, file)
    if data.get("kind") == "inference":
        raise SpecError(f"{file}: is of an inference task; its logits are in predictions.safetensors beside it")
    return data


def _task(data: Mapping[str, Any], objects: Mapping[str, Any], folder: Path) -> Task:
    """The task that was trained, with the model and graph that were objects.

    A function that was an object has its name only; its results need no more.
    """

    def chosen(kind: str) -> Any:
        described, value = data[kind], objects[kind]
        return value.get(described.strip("<>")) if isinstance(value, Mapping) else value

    def described(value: Any) -> Any:
        return FunctionRef(value.strip("<>")) if _is_object(value) else value

    settings, label = dict(data), data.get("name") or data["model"]
    if _is_object(data["model"]):
        settings["model"] = chosen("model")
        if settings["model"] is None:
            raise SpecError(
                f"{folder}: task {label!r} was trained with a model that was given as an object; give it again: "
                f"weft.read(folder, model={data['model'].strip('<>')})"
            )
    elif objects["model"] is not None and not isinstance(objects["model"], Mapping):
        settings["model"] = objects["model"]
    settings |= {name: described(data[name]) for name in OWN_FUNCTIONS if name in data}
    settings["callbacks"] = [{**entry, "call": described(entry["call"])} for entry in data.get("callbacks", ())]
    if _is_object(data["graph"]):
        settings["graph"] = chosen("graph") or data["graph"]
    try:
        return Task.from_dict(settings)
    except InputError as error:
        raise SpecError(f"{folder / RESULT}: {error}") from None


def _is_object(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(OBJECT)


def _sweep(folder: Path, data: Mapping[str, Any], objects: Mapping[str, Any]) -> SweepResult:
    """A sweep as it was written if names say everything of it, else one with the same members."""
    names = folder_names([row["name"] for row in data["tasks"]])
    folders = [folder / "tasks" / name for name in names]
    members = [LoadedResult.of(member, _read(member / RESULT), objects) for member in folders]
    tasks, sweep = [member.task for member in members], None
    if all(isinstance(thing, str) and not _is_object(thing) for task in tasks for thing in (task.graph, task.model)):
        with suppress(InputError):
            sweep = Sweep.from_dict(data["sweep"])
    if sweep is None or [task.to_dict() for task in sweep] != [task.to_dict() for task in tasks]:
        try:
            sweep = Sweep.from_tasks(tasks, data["sweep"].get("name"))
        except SpecError:  # trials of a tuner may have equal settings
            sweep = Sweep.of_trials(tasks, data["sweep"].get("name"))
    plans = tuple(Plan.from_dict(plan) for plan in data["plan"])
    graphs = data["graphs"] if isinstance(data.get("graphs"), dict) else {}
    sizes = [{key: value for key, value in size.items() if key not in OF_MEMBERS} for size in graphs.values()]
    by_name = dict(zip(sweep.graphs, sizes, strict=False))
    importance = data.get("importance", {})
    return SweepResult(sweep, list(members), plans, data["environment"], data["seconds"], by_name, importance)
