"""From a request to tasks for the queue: declarative settings, models of the registry, graphs of the operator's folder.

A model is one of Weft's own names, or an import path that the operator allows (``module:callable``, or ``module:*`` for
all of a module); so are objectives, metrics, optimizers, schedules and callbacks. A graph is ``demo``, a generated
shape, or a path inside the operator's folder. Nothing here imports a model or reads a graph: that happens in worker
processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.core.errors import InputError, WeftError
from weft.core.models import BUILT_IN
from weft.core.settings.field_rule import is_reference
from weft.core.settings.grid.values import varies
from weft.core.sweep import Sweep
from weft.core.task import ALL_SPLITS, OWN_FUNCTIONS, Task
from weft.core.units import parse_bytes
from weft.serve.http.inference_requests import Find, inference_source, inference_spec
from weft.serve.http.json_limits import BadRequestError
from weft.serve.http.tokens import OPERATOR
from weft.serve.options import ServeOptions
from weft.serve.queue.queue_db import Submission

FIELDS = ("task", "tasks", "infer", "key", "priority", "after", "deadline", "budget", "max_attempts", "user")
MOST_TASKS = 10_000
LONGEST_TEXT = 200
LONGEST_USER = 100
DOWNLOADED = ("planetoid", "ogb", "pyg")
PUBLISHED = ("cora", "citeseer", "pubmed")  # graphs that are downloaded by their bare names


@dataclass(frozen=True)
class Registry:
    """What tasks may name: models and graphs."""

    models: tuple[str, ...] = ()
    graphs: Path | None = None
    downloads: bool = False

    @classmethod
    def of(cls, options: ServeOptions) -> Registry:
        """The registry of a server."""
        return cls(options.models, options.graphs, options.downloads)

    def check_model(self, model: Any) -> None:
        """Refuse a model that is neither Weft's own nor allowed."""
        if isinstance(model, str) and (model in BUILT_IN or self._allows(model)):
            return
        allowed = ", ".join((*BUILT_IN, *self.models))
        raise BadRequestError(
            f"model={str(model)[:80]!r} is not in the registry ({allowed}); the operator can allow an import path"
        )

    def check_functions(self, task: Mapping[str, Any]) -> None:
        """Refuse functions that a task names (a loss, a callback) unless they are allowed, as models are."""
        called = task.get("callbacks") or ()
        tables = called if isinstance(called, (list, tuple)) else (called,)
        named = [(name, task.get(name)) for name in OWN_FUNCTIONS]
        named += [("callbacks", one.get("call")) for one in tables if isinstance(one, Mapping)]
        for name, value in named:
            if is_reference(value) and not self._allows(str(value)):
                raise BadRequestError(
                    f"{name}={str(value)[:80]!r} is not in the registry; the operator can allow an import path"
                )

    def _allows(self, path: str) -> bool:
        """Whether an import path is allowed, by itself or with its whole module."""
        return path in self.models or (":" in path and f"{path.rpartition(':')[0]}:*" in self.models)

    def graph_path(self, graph: Any) -> str | None:
        """The path of a graph in the operator's folder; None for one that is known by its name."""
        if not isinstance(graph, str) or not graph:
            raise BadRequestError('graph must be a name or a path inside the graphs folder, such as "demo"')
        kind, colon, _ = graph.partition(":")
        if graph == "demo" or (colon and kind == "shape"):
            return None
        if not (colon and kind in DOWNLOADED):
            place = self._found(graph)
            if place is not None or graph.lower() not in PUBLISHED:
                return place or self._inside(graph)
        if not self.downloads:
            raise BadRequestError(
                f"graph={graph[:80]!r} would be downloaded, and downloads are off on this server; "
                "the operator can allow them by --allow-downloads"
            )
        return None

    def weights_path(self, weights: Any) -> str:
        """The path of a file of weights in the operator's folder."""
        if not isinstance(weights, str) or not weights.endswith(".safetensors"):
            raise BadRequestError("infer.weights must be the path of a .safetensors file inside the graphs folder")
        return self._inside(weights, "infer.weights")

    def _inside(self, graph: str, what: str = "graph") -> str:
        place, told = self._found(graph), f"{what}={graph[:80]!r}"
        if place is None and self.graphs is None:
            raise BadRequestError(f"{told} is not known here; this server has no graphs folder")
        if place is None:
            raise BadRequestError(f"{told} is not in the graphs folder")
        return place

    def _found(self, graph: str) -> str | None:
        """The path of a file or folder inside the operator's, if it is there."""
        if self.graphs is None:
            return None
        root = self.graphs.resolve()
        for name in (graph, f"{graph}.npz"):
            try:
                place = (root / name).resolve()
                found = place != root and place.is_relative_to(root) and place.exists()
            except (OSError, ValueError, RuntimeError):
                break
            if found:
                return str(place)
        return None


def submitting_user(body: Any, user: str) -> str:
    """Whom a request of ``user`` submits for: themselves, or whom the operator names."""
    named = body.get("user") if isinstance(body, dict) else None
    if named is None:
        return user
    if not isinstance(named, str):
        raise BadRequestError("user must be a text")
    if user == OPERATOR:
        return named[:LONGEST_USER]
    if named != user:
        told = f"user={named[:LONGEST_USER]!r}: your token is that of {user!r}"
        raise BadRequestError(f"{told}, and only the operator may submit for others; leave user out", 403)
    return user


def read_submissions(body: Any, registry: Registry, user: str, find: Find) -> list[Submission]:
    """The tasks of a request: one under ``task``, several under ``tasks``, or an inference task under ``infer``."""
    if not isinstance(body, dict):
        raise BadRequestError('the body must be an object such as {"task": {"graph": "demo", "model": "gcn"}}')
    unknown = sorted(set(body) - set(FIELDS))
    if unknown:
        raise BadRequestError(f"unknown field {unknown[0][:80]!r}; known are {', '.join(FIELDS)}")
    if body.get("infer") is not None:
        return [_inference(body, registry, user, find)]
    several = "tasks" in body
    if several == ("task" in body):
        raise BadRequestError("give either task or tasks")
    tasks = body["tasks"] if several else [body["task"]]
    if not isinstance(tasks, list) or not 1 <= len(tasks) <= MOST_TASKS:
        raise BadRequestError(f"tasks must be a list of 1 to {MOST_TASKS:,} tasks")
    common, key = _common(body, user), _text(body, "key")
    keys = [None if key is None else f"{user}/{key}/{i}" for i in range(len(tasks))]
    limits = _limits(body)
    return [
        Submission({"task": _settings(task), **_graph(task, registry), **limits}, key=one, **common)
        for task, one in zip(tasks, keys, strict=True)
    ]


def _inference(body: Mapping[str, Any], registry: Registry, user: str, find: Find) -> Submission:
    if "tasks" in body:
        raise BadRequestError("an inference task is submitted alone; leave tasks out")
    settings, of = inference_source(body, find)
    infer = inference_spec(body) | ({"of": of} if of is not None else {})
    if of is None:
        infer["weights"] = registry.weights_path(body["infer"]["weights"])
    spec = {"task": _settings(settings), "kind": "inference", "infer": infer, **_graph(settings, registry)}
    common, key = _common(body, user), _text(body, "key")
    if of is not None:
        common["after"] = tuple(dict.fromkeys((*common["after"], of)))
    return Submission({**spec, **_limits(body)}, key=None if key is None else f"{user}/{key}/0", **common)


def _graph(task: Any, registry: Registry) -> dict[str, Any]:
    registry.check_model(task.get("model", "gcn"))
    registry.check_functions(task)
    place = registry.graph_path(task.get("graph"))
    return {} if place is None else {"graph_path": place}


def _settings(task: Any) -> dict[str, Any]:
    """The settings of one task, checked as :class:`weft.Task` checks them."""
    if not isinstance(task, dict):
        raise BadRequestError("a task must be an object of settings")
    found = {key: value for key, value in task.items() if value is not None or key != "name"}
    for key, value in found.items():
        if key != "model_args" and varies(key, value):
            raise BadRequestError(f"{key} lists several values; send each task of a sweep, as `weft submit` does")
    if "graph" in found and not isinstance(found["graph"], str):
        raise BadRequestError("graph must be a name or a path inside the graphs folder")
    if not isinstance(found.get("model", "gcn"), str):
        raise BadRequestError("model must be a name")
    name = found.get("name")
    if name is not None and (not isinstance(name, str) or len(name) > LONGEST_TEXT):
        raise BadRequestError(f"name must be a text of at most {LONGEST_TEXT} characters")
    try:
        checked = Task.from_dict(found)
    except WeftError as error:
        raise BadRequestError(str(error)) from None
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        raise BadRequestError(f"the task cannot be read ({type(error).__name__}: {str(error)[:120]})") from None
    if checked.split == ALL_SPLITS:
        raise BadRequestError("split='all' is for weft.run; send a task per split, with its number")
    return found


def _common(body: Mapping[str, Any], user: str) -> dict[str, Any]:
    after = body.get("after") or []
    if not isinstance(after, list) or len(after) > 1000 or not all(isinstance(one, str) for one in after):
        raise BadRequestError("after must be a list of task ids")
    return {
        "user": user,
        "priority": _integer(body, "priority", 0, -1000, 1000),
        "after": tuple(after),
        "max_attempts": _integer(body, "max_attempts", 3, 1, 20),
        "said_key": _text(body, "key"),
    }


def _limits(body: Mapping[str, Any]) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    if body.get("budget") is not None:
        if not isinstance(body["budget"], (str, int, float)) or isinstance(body["budget"], bool):
            raise BadRequestError('budget must be bytes, such as "2GiB"')
        try:
            limits["budget"] = parse_bytes(body["budget"])
        except (InputError, ValueError, OverflowError) as error:
            raise BadRequestError(f"budget: {error}") from None
    if body.get("deadline") is not None:
        value = body["deadline"]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e12:
            raise BadRequestError("deadline must be a time in seconds since 1970")
        limits["deadline"] = float(value)
    if body.get("max_attempts") is not None:  # the number of the task rises when it is paused or its server ends
        limits["max_attempts"] = body["max_attempts"]
    return limits


def _integer(body: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = body.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequestError(f"{name} must be a whole number from {low} to {high}")
    return value


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and (not isinstance(value, str) or not 1 <= len(value) <= LONGEST_TEXT):
        raise BadRequestError(f"{name} must be a text of 1 to {LONGEST_TEXT} characters")
    return value


def given_settings(task: Task) -> dict[str, Any]:
    """The settings that a task gives, as plain data to send; refuses a graph or a model given as an object."""
    for key in ("graph", "model"):
        if not isinstance(getattr(task, key), str):
            raise InputError(f"task {task.label!r}: its {key} is an object, which cannot be sent; give a name or path")
    functions = [(name, getattr(task, name)) for name in OWN_FUNCTIONS]
    for key, value in (*functions, *(("callbacks", one.call) for one in task.callbacks)):
        if not isinstance(value, str):
            raise InputError(
                f"task {task.label!r}: its {key} is a function, which cannot be sent; name it, as module:function"
            )
    whole = task.to_dict()
    return {name: whole[name] for name in sorted(task.given) if name in whole and whole[name] is not None}


def tasks_of(work: Task | Sweep | Sequence[Task]) -> list[dict[str, Any]]:
    """Every task of ``work`` as plain data to send."""
    return [given_settings(task) for task in ([work] if isinstance(work, Task) else list(work))]
