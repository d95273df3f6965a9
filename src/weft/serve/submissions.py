"""From a request to tasks for the queue: declarative settings, models of the registry, graphs of the operator's folder.

A model is one of Weft's own names, or an import path that the operator allows (``module:callable``, or ``module:*`` for
all of a module); so are objectives, metrics, optimizers, schedules and callbacks. A graph is ``demo``, a generated
shape, or a path inside the operator's folder. Nothing here imports a model or reads a graph: that happens in worker
processes.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.core.errors import InputError, SpecError, WeftError
from weft.core.models import BUILT_IN
from weft.core.run_options import RunOptions, options_of
from weft.core.settings import Rule, is_reference
from weft.core.sweep import varies
from weft.core.task import ALL_SPLITS, OWN_FUNCTIONS, Task
from weft.core.wording import option
from weft.serve.queue_db import QueueTask, Submission

if TYPE_CHECKING:
    from weft.serve.options import ServeOptions

# ---- Read JSON from strangers: bounded in size and depth, finite numbers, text that can be stored.

MOST_BYTES = 4 << 20
MOST_DEPTH = 32
MOST_BRACKETS = 400_000  # of lists and objects: reading two million of them keeps the interpreter for 0.3 s
LARGEST = 2**63 - 1
# A text that does not end goes on to the end of the body: looked for again from each of its quotes it would take hours.
TEXT_OR_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)


UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


class BadRequestError(InputError):
    """What was sent cannot be used; ``status`` is the HTTP status to answer with."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def read_json(body: bytes) -> Any:
    """The value in ``body``; a :class:`BadRequestError` for anything with too many parts, too deep or no JSON."""
    depth = brackets = 0
    for token in TEXT_OR_BRACKET.finditer(body):
        first = body[token.start()]
        brackets += first != ord('"')
        depth += (first in b"[{") - (first in b"]}")
        if depth > MOST_DEPTH:
            raise BadRequestError(f"the body nests more than {MOST_DEPTH} levels deep")
        if brackets > MOST_BRACKETS:
            raise BadRequestError(f"the body has more than {MOST_BRACKETS // 2:,} lists and objects", 413)
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not JSON ({str(error)[:200]})") from None
    check_values(value)
    return value


def check_values(value: Any) -> None:
    """Refuse numbers and text that the queue cannot hold."""
    if isinstance(value, str):
        if UNSTORABLE.search(value):
            raise BadRequestError(f"the text {value[:40]!r} has characters that cannot be stored")
    elif isinstance(value, (int, float)):
        if not (abs(value) <= LARGEST if isinstance(value, int) else math.isfinite(value)):
            raise BadRequestError("a number is too large")
    elif isinstance(value, dict):
        for key, item in value.items():
            check_values(key)
            check_values(item)
    elif isinstance(value, list):
        for item in value:
            check_values(item)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


# ---- Options of a submission: one table of rules for the client and the server.

LARGEST_NODE = 2**62 - 1
MOST_TASKS = 10_000
MOST_SETTINGS_BYTES = 64 << 10  # of a task: a page of a listing has the settings of all of its tasks
MOST_DEPENDENCIES = 10_000  # tasks x after of a submission: each is a row, and is looked at by every decision
LONGEST_TEXT = 200
LONGEST_USER = 100


OPTION_RULES = {
    "priority": Rule(int, low=-1000, high=1000, described="a whole number from -1000 to 1000"),
    "max_attempts": Rule(int, low=1, high=20, described="a whole number from 1 to 20"),
    "deadline": Rule(float, low=0, below=1e12, described="a time in seconds since 1970, such as time.time() + 3600"),
    "time_limit": Rule(float, above=0, below=1e12, described="a number of seconds above 0"),
    "latency_target": Rule(float, above=0, high=86_400, described="a number of seconds above 0 and at most 86,400"),
    "key": Rule(str, described=f"a text of 1 to {LONGEST_TEXT} characters"),
}


def check_option(name: str, value: Any) -> Any:
    """``value`` of an option of a submission in its proper type; a :class:`SpecError` for one that cannot be used."""
    rule = OPTION_RULES[name]
    if value is None:
        return None
    checked = rule.check("", name, value)
    if name == "key" and not 1 <= len(checked) <= LONGEST_TEXT:
        raise SpecError(f"{option(name, value)} must be {rule.described}")
    return checked


def _option(body: Mapping[str, Any], name: str) -> Any:
    """The value of an option in a request."""
    try:
        return check_option(name, body.get(name))
    except InputError as error:
        raise BadRequestError(str(error)) from None


# ---- From a request to an inference task: the weights of a task of the queue or of a file, a graph, nodes, a target.
#
# ``{"infer": {"of": TASK, "nodes": "test", "latency_target": 0.5}}`` uses the best weights of a task, once it is done.
# ``{"task": SETTINGS, "infer": {"weights": FILE}}`` uses a safetensors file in the operator's folder of graphs.

INFER_FIELDS = ("of", "weights", "nodes", "graph", "latency_target")
NODE_NAMES = ("all", "train", "val", "test")
MOST_NODES = 100_000  # more are a split, or all
Find = Callable[[str], QueueTask]


def inference_spec(body: Mapping[str, Any], registry: Registry, find: Find) -> tuple[dict[str, Any], str | None]:
    """The spec of an inference task, and the task whose weights it uses."""
    infer = body["infer"]
    if not isinstance(infer, dict):
        raise BadRequestError('infer must be an object such as {"of": TASK, "nodes": "test"}')
    unknown = sorted(set(infer) - set(INFER_FIELDS))
    if unknown:
        raise BadRequestError(f"unknown field infer.{unknown[0][:80]}; known are {', '.join(INFER_FIELDS)}")
    of, settings, nodes = infer.get("of"), body.get("task"), infer.get("nodes")
    if (of is None) == (settings is None) or (of is None) != (infer.get("weights") is not None):
        raise BadRequestError("give infer.of, a task whose weights to use, or task with infer.weights, a file")
    if of is not None:  # the settings that the model was trained with
        if not isinstance(of, str):
            raise BadRequestError("infer.of must be the id of a task")
        trained = find(of)
        if trained.spec.get("kind") == "inference":
            raise BadRequestError(f"infer.of={of[:80]!r} is an inference task, which has no weights of its own")
        settings = {name: value for name, value in trained.spec["task"].items() if name != "name"}
    elif not isinstance(settings, dict):
        raise BadRequestError("a task must be an object of settings")
    if infer.get("graph") is not None:
        settings = {**settings, "graph": infer["graph"]}
    target = _option(infer, "latency_target")
    if nodes is not None and not (isinstance(nodes, str) and nodes in NODE_NAMES):
        whole = isinstance(nodes, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in nodes)
        if not whole or not 1 <= len(nodes) <= MOST_NODES or not all(0 <= node <= LARGEST_NODE for node in nodes):
            expected = f"{', '.join(NODE_NAMES)} or a list of up to {MOST_NODES:,} node ids"
            raise BadRequestError(f"infer.nodes must be {expected}")
    source = {"of": of} if of is not None else {"weights": registry.weights_path(infer["weights"])}
    kept = {"nodes": nodes} | ({} if target is None else {"latency_target": target}) | source
    return {**_spec(settings, registry), "kind": "inference", "infer": kept}, of


# ---- Who may use the server: tokens and the users they stand for.

SHORTEST = 16
OPERATOR, THE_OPERATOR = "", "the operator"  # as a user and on record: no user has a name of two words


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach ``host``."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Tokens:
    """Tokens by their digest, each with its user; ``open``: everybody is let in (on loopback, if so asked).

    The user ``""`` is the operator, who may change the tasks of all.
    """

    users: Mapping[bytes, str] = field(default_factory=dict)
    open: bool = False

    @classmethod
    def read(cls, path: Path) -> Tokens:
        """The tokens in a file: one per line, with a user before it (``anna TOKEN``) or alone (the operator's)."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(f"token file {path}: cannot be read ({error})") from None
        users: dict[bytes, str] = {}
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) > 2 or len(words[-1]) < SHORTEST:
                raise SpecError(f"{path}, line {number}: expected 'USER TOKEN', a token of at least {SHORTEST} letters")
            users[_digest(words[-1])] = words[0] if len(words) == 2 else OPERATOR
        if not users:
            raise SpecError(f"token file {path}: has no token; add a line 'USER TOKEN'")
        return cls(users)

    def user_of(self, token: str) -> str | None:
        """Who ``token`` stands for; None if nobody. Takes the same time however much of it is right."""
        asked, found = _digest(token), None
        for known, user in self.users.items():
            if hmac.compare_digest(known, asked):
                found = user
        return found


def make_token_file(path: Path) -> None:
    """Write a file with a new operator's token, readable by its owner alone; an existing one is kept."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
        except OSError:  # a full disk: half a token would let nobody in
            path.unlink(missing_ok=True)
            raise
    except FileExistsError:
        return
    except OSError as error:
        told = f"{path}: no token could be written there ({(error.strerror or str(error)).lower()})"
        raise SpecError(f"{told}; free the place, or give a file by --token") from None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


RUN_OPTIONS = tuple(row.name for row in options_of("run"))
FIELDS = ("task", "tasks", "sweep", "infer", "after", "user")
FIELDS += tuple(name for name in OPTION_RULES if name != "latency_target")
FIELDS += tuple(row.name for row in options_of("queue"))
DOWNLOADED = ("planetoid", "ogb", "pyg")
PUBLISHED = ("cora", "citeseer", "pubmed")  # graphs that are downloaded by their bare names


@dataclass(frozen=True)
class Registry:
    """What tasks may name: models and graphs."""

    models: tuple[str, ...] = ()
    graphs: Path | None = None
    downloads: bool = False

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
            raise BadRequestError(f"{told} is not a file, or a folder of files, in the graphs folder")
        return place

    def _found(self, graph: str) -> str | None:
        """The path of a file or folder inside the operator's, if it is there."""
        if self.graphs is None:
            return None
        root = self.graphs.resolve()
        for name in (graph, f"{graph}.npz"):
            try:
                place = (root / name).resolve()
                found = place != root and place.is_relative_to(root) and is_regular(place)
            except (OSError, ValueError, RuntimeError):
                break
            if found:
                return str(place)
        return None


def is_regular(path: Path) -> bool:
    """Whether ``path`` is a file or a folder of files: opening a FIFO, a socket or a device may wait for ever."""
    if path.is_dir():
        return all(inside.is_file() or inside.is_dir() for inside in path.iterdir())
    return path.is_file()


def submitting_user(body: Mapping[str, Any], user: str) -> str:
    """Whom a request of ``user`` submits for: themselves, or whom the operator names."""
    named = body.get("user")
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


def read_request(
    body: bytes, user: str, options: ServeOptions, registry: Registry, find: Find
) -> tuple[list[Submission], int]:
    """The tasks that the body of a request of ``user`` asks for, and the bytes of their specs.

    Refuses what is beyond the server's caps; that of priorities is not for the operator.
    """
    request = read_json(body)
    if not isinstance(request, dict):
        raise BadRequestError('the body must be an object such as {"task": {"graph": "demo", "model": "gcn"}}')
    priority, limit, most = _option(request, "priority"), _option(request, "time_limit"), options.time_limit
    if user != OPERATOR and (priority or 0) > options.max_priority:
        cap = f"users of this server may give at most {options.max_priority}"
        raise BadRequestError(f"priority={priority}: {cap}; lower it, or ask the operator to submit it", 403)
    if limit is not None and most is not None and limit > most:
        raise BadRequestError(f"time_limit={limit:g}: a task may run for at most {most:g} s here; lower it")
    new = read_submissions(request, registry, submitting_user(request, user), find)
    new = [replace(submission, by=user or THE_OPERATOR) for submission in new]
    return new, sum(len(submission.text) for submission in new)


def read_submissions(body: Mapping[str, Any], registry: Registry, user: str, find: Find) -> list[Submission]:
    """The tasks of a request: one under ``task``, several under ``tasks``, or an inference task under ``infer``."""
    unknown = sorted(set(body) - {*FIELDS, *RUN_OPTIONS})
    if unknown:
        raise BadRequestError(f"unknown field {unknown[0][:80]!r}; known are {', '.join(FIELDS)}")
    after = body.get("after") or []
    if not isinstance(after, list) or len(after) > 1000 or not all(isinstance(name, str) for name in after):
        raise BadRequestError("after must be a list of task ids")
    sweep = _sweep(body)
    if body.get("infer") is not None:
        if "tasks" in body:
            raise BadRequestError("an inference task is submitted alone; leave tasks out")
        spec, of = inference_spec(body, registry, find)
        specs = [spec]
        after = after if of is None else [*after, of]
    else:
        several = "tasks" in body
        if several == ("task" in body):
            raise BadRequestError("give either task or tasks")
        tasks = body["tasks"] if several else [body["task"]]
        if not isinstance(tasks, list) or not 1 <= len(tasks) <= MOST_TASKS:
            raise BadRequestError(f"tasks must be a list of 1 to {MOST_TASKS:,} tasks")
        specs = [_spec(task, registry) for task in tasks]
    options = _run_options(body, specs)
    after = tuple(dict.fromkeys(after))
    if len(specs) * len(after) > MOST_DEPENDENCIES:
        what = f"{len(specs):,} tasks that each wait for {len(after):,} others"
        most = f"a submission may have {MOST_DEPENDENCIES:,} dependencies"
        raise BadRequestError(f"{what} are too many; {most}: name fewer tasks in after, such as the last of a chain")
    key, priority, attempts = (_option(body, name) for name in ("key", "priority", "max_attempts"))
    # max_attempts is kept as it was sent: the number of the task rises when it is paused or its server ends.
    limits = {name: _option(body, name) for name in ("deadline", "time_limit")} | {"max_attempts": attempts}
    limits |= {"budget": options.pop("budget", None), "options": options or None}
    limits = {name: value for name, value in limits.items() if value is not None}
    return [
        Submission(
            {**spec, **limits},
            key=None if key is None else f"{user}/{key}/{number}",
            user=user,
            priority=priority or 0,
            after=after,
            max_attempts=attempts or 3,
            said_key=key,
            sweep=sweep,
        )
        for number, spec in enumerate(specs)
    ]


def _sweep(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What the sweep is that the tasks of a request are of: as it says, or without a name if it has several tasks."""
    tasks, sweep = body.get("tasks"), body.get("sweep")
    if sweep is None:
        return {} if isinstance(tasks, list) and len(tasks) > 1 else None
    name = sweep.get("name") if isinstance(sweep, dict) else 0
    if not isinstance(tasks, list) or (name is not None and (not isinstance(name, str) or len(name) > LONGEST_TEXT)):
        most = f"a name of at most {LONGEST_TEXT} characters"
        raise BadRequestError(f"sweep must be an object such as weft.Sweep.to_dict() gives, with {most}, beside tasks")
    if len(json.dumps(sweep)) > MOST_SETTINGS_BYTES:
        raise BadRequestError(f"sweep has more than {MOST_SETTINGS_BYTES:,} bytes; send its name alone", 413)
    return sweep


def _run_options(body: Mapping[str, Any], specs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The options of a run in a request, checked as :func:`weft.run` checks them for its tasks."""
    given = {name: body[name] for name in RUN_OPTIONS if body.get(name) is not None}
    try:
        options = RunOptions.of(**given)
        plain = options.for_queue
        if given.keys() - {"budget"}:
            if body.get("infer") is not None:
                raise SpecError(f"{option(*next(iter(given.items())))} is for trainings; leave it out")
            options.check_tasks([Task.from_dict(spec["task"]) for spec in specs])
    except InputError as error:
        raise BadRequestError(str(error)) from None
    return plain


def _spec(task: Any, registry: Registry) -> dict[str, Any]:
    """The settings of one task, checked as :class:`weft.Task` checks them, and the path of its graph if it has one."""
    if not isinstance(task, dict):
        raise BadRequestError("a task must be an object of settings")
    found = {key: value for key, value in task.items() if value is not None or key != "name"}
    if (size := len(json.dumps(found))) > MOST_SETTINGS_BYTES:
        most = f"a task may have {MOST_SETTINGS_BYTES:,}"
        raise BadRequestError(f"the settings of a task have {size:,} bytes, and {most}; put data into the graph", 413)
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
    registry.check_model(found.get("model", "gcn"))
    registry.check_functions(found)
    place = registry.graph_path(found.get("graph"))
    return {"task": found} if place is None else {"task": found, "graph_path": place}


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


# ---- What users are shown has no folders of the server in it: paths are relative to the folder of graphs, or of runs.


class HiddenPaths:
    """Leaves ``roots`` out of the paths inside them."""

    def __init__(self, *roots: Path | None) -> None:
        places = [place for root in roots if root is not None for place in (root.absolute(), root.resolve())]
        self._roots = [f"{place}/" for place in dict.fromkeys(places) if len(place.parts) > 1]
        escaped = [json.dumps(root, ensure_ascii=ascii) for root in self._roots for ascii in (False, True)]
        self._in_json = list(dict.fromkeys(root[1:-1] for root in escaped))

    def text(self, text: str) -> str:
        """``text`` without the roots."""
        for root in self._roots:
            text = text.replace(root, "")
        return text

    def json_text(self, text: str) -> str:
        """A text of JSON without the roots."""
        for root in self._in_json:
            text = text.replace(root, "")
        return text

    def data(self, value: Any) -> Any:
        """Plain data without the roots, also in names."""
        return json.loads(self.json_text(json.dumps(value, ensure_ascii=False)))
