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

from weft.core.errors import InputError, SpecError
from weft.core.models import BUILT_IN
from weft.core.run_options import RunOptions, options_of
from weft.core.settings import Rule, is_reference, plain_hop, read_fanout
from weft.core.sweep import varies
from weft.core.task import ALL_SPLITS, OWN_FUNCTIONS, Task
from weft.core.wording import option
from weft.graph.catalog.listing import check_name
from weft.serve.queue_db import QueueTask, Submission

if TYPE_CHECKING:
    from weft.serve.options import ServeOptions

# ---- Read JSON from strangers: bounded in size and depth, finite numbers, text that can be stored.

MOST_BYTES = 4 << 20
MOST_DEPTH = 32
MOST_BRACKETS = 400_000  # of lists and objects: reading two million of them keeps the interpreter for 0.3 s
LARGEST = 2**63 - 1
# An unclosed string matches to the end of the body: a search that began again at each of its quotes would take hours.
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
MOST_DEPENDENCIES = 10_000  # tasks x after of a submission: each is a row that every decision reads
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
    """Return the value of a submission's option in its proper type, or raise a :class:`SpecError`."""
    rule = OPTION_RULES[name]
    if value is None:
        return None
    checked = rule.check("", name, value)
    if name == "key" and not 1 <= len(checked) <= LONGEST_TEXT:
        raise SpecError(f"{option(name, value)} must be {rule.described}")
    return checked


# ---- From a request to an inference task: the weights of a task of the queue or of a file, a graph, nodes, a target.
#
# ``{"infer": {"of": TASK, "nodes": "test", "latency_target": 0.5}}`` uses the best weights of a task, once it is done.
# ``{"task": SETTINGS, "infer": {"weights": FILE}}`` uses a safetensors file in the operator's folder of graphs.
# With ``"resident": true`` the model stays loaded and answers requests for predictions.

INFER_FIELDS = ("of", "weights", "nodes", "graph", "latency_target", "resident")
PREDICT_FIELDS = ("task", "nodes", "fanout", "seed", "latency_target")
NODE_NAMES = ("all", "train", "val", "test")
MOST_NODES = 100_000  # more are a split, or all
MOST_PREDICTED = 10_000  # nodes of a request that is answered at once
Find = Callable[[str], QueueTask]


def inference_spec(body: Mapping[str, Any], registry: Registry, find: Find) -> tuple[dict[str, Any], str | None]:
    """Return the spec of an inference task, and the id of the task whose weights it uses (None: of a file)."""
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
    target = check_option("latency_target", infer.get("latency_target"))
    resident = infer.get("resident", False)
    if not isinstance(resident, bool) or (resident and nodes is not None):
        raise BadRequestError("infer.resident must be true or false, and a resident model is given nodes by requests")
    if nodes is not None and not (isinstance(nodes, str) and nodes in NODE_NAMES):
        check_node_list(nodes, "infer.nodes", MOST_NODES, f"{', '.join(NODE_NAMES)} or ")
    source = {"of": of} if of is not None else {"weights": registry.weights_path(infer["weights"])}
    checked = {"nodes": nodes} | ({} if target is None else {"latency_target": target}) | source
    checked |= {"resident": True} if resident else {}
    return {**_spec(settings, registry, {}), "kind": "inference", "infer": checked}, of


def check_node_list(nodes: Any, name: str, most: int, other: str = "") -> None:
    """A :class:`BadRequestError` unless ``nodes`` are up to ``most`` node ids; ``other``: what else they may be."""
    whole = isinstance(nodes, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in nodes)
    if not whole or not 1 <= len(nodes) <= most or not all(0 <= node <= LARGEST_NODE for node in nodes):
        raise BadRequestError(f"{name} must be {other}a list of up to {most:,} node ids")


def read_prediction(body: bytes) -> dict[str, Any]:
    """Parse a request for predictions: ``{"task": TASK, "nodes": [3, 5, 8]}``, with ``fanout`` and ``seed``."""
    request = read_json(body)
    if not isinstance(request, dict) or not isinstance(request.get("task"), str):
        raise BadRequestError('the body must be an object such as {"task": TASK, "nodes": [3, 5, 8]}')
    unknown = sorted(set(request) - set(PREDICT_FIELDS))
    if unknown:
        raise BadRequestError(f"unknown field {unknown[0][:80]!r}; known are {', '.join(PREDICT_FIELDS)}")
    check_node_list(request.get("nodes"), "nodes", MOST_PREDICTED)
    fanout = None if request.get("fanout") is None else [plain_hop(hop) for hop in read_fanout(request["fanout"])]
    seed = Rule(int, optional=True, low=0, below=2**62).check("", "seed", request.get("seed"))
    if seed is not None and fanout is None:
        raise BadRequestError("seed would have no effect: nothing is drawn without fanout")
    target = check_option("latency_target", request.get("latency_target"))
    return {**request, "fanout": fanout, "seed": seed, "latency_target": target}


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
    """Users by the digest of their token; ``open``: the server needs no token (``--no-auth``, on loopback only).

    The user ``""`` is the operator, who may change the tasks of all.
    """

    users: Mapping[bytes, str] = field(default_factory=dict)
    open: bool = False

    @classmethod
    def read(cls, path: Path) -> Tokens:
        """Read the tokens in a file: one per line, after a user's name (``anna TOKEN``) or alone (the operator's)."""
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
        """Return the user of ``token``, None if it is unknown, in a time that does not depend on how much is right."""
        digest, matching = _digest(token), None
        for stored, user in self.users.items():
            if hmac.compare_digest(stored, digest):
                matching = user
        return matching


def make_token_file(path: Path) -> None:
    """Write a file with a new operator's token, readable by its owner alone; an existing one is kept."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
        except OSError:  # a full disk: half a token would fit no request
            path.unlink(missing_ok=True)
            raise
    except FileExistsError:
        return
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SpecError(f"{path}: no token could be written there ({reason}); give a file by --token") from None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


RUN_OPTIONS = tuple(row.name for row in options_of("run"))
FIELDS = ("task", "tasks", "sweep", "infer", "after", "user")
FIELDS += tuple(name for name in OPTION_RULES if name != "latency_target")
FIELDS += tuple(row.name for row in options_of("queue"))
DOWNLOADED = ("planetoid", "ogb", "pyg")
PLAIN = Task("demo").to_dict()  # every setting at its default
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
        named += [("callbacks", table.get("call")) for table in tables if isinstance(table, Mapping)]
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
        if graph == "demo" or (colon and kind in ("shape", "planted")):
            check_name(graph)
            return None
        if not (colon and kind in DOWNLOADED):
            path = self._find(graph)
            if path is not None or graph.lower() not in PUBLISHED:
                return path or self._inside(graph)
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
        path, shown = self._find(graph), f"{what}={graph[:80]!r}"
        if path is None and self.graphs is None:
            raise BadRequestError(f"{shown} is not known here; this server has no graphs folder")
        if path is None:
            raise BadRequestError(f"{shown} is not a file, or a folder of files, in the graphs folder")
        return path

    def _find(self, graph: str) -> str | None:
        """Return the path of a file or folder inside the operator's folder; None if it does not exist."""
        if self.graphs is None:
            return None
        root = self.graphs.resolve()
        for name in (graph, f"{graph}.npz"):
            try:
                path = (root / name).resolve()
                if path != root and path.is_relative_to(root) and is_regular(path):
                    return str(path)
            except (OSError, ValueError, RuntimeError):
                break
        return None


def is_regular(path: Path) -> bool:
    """Whether ``path`` is a file or a folder of files: opening a FIFO, a socket or a device may wait for ever."""
    if path.is_dir():
        return all(inside.is_file() or inside.is_dir() for inside in path.iterdir())
    return path.is_file()


def submitting_user(body: Mapping[str, Any], user: str) -> str:
    """Return the user to submit for: the one who sent the request, or the one that the operator names."""
    named = body.get("user")
    if named is None:
        return user
    if not isinstance(named, str):
        raise BadRequestError("user must be a text")
    if user == OPERATOR:
        return named[:LONGEST_USER]
    if named != user:
        mismatch = f"user={named[:LONGEST_USER]!r}: your token is that of {user!r}"
        raise BadRequestError(f"{mismatch}, and only the operator may submit for others; leave user out", 403)
    return user


def read_request(
    body: bytes, user: str, options: ServeOptions, registry: Registry, find: Find
) -> tuple[list[Submission], int]:
    """Parse a request of ``user`` into submissions; also returns the bytes of their specs.

    Refuses what exceeds the server's limits; the limit on priorities does not hold for the operator.
    """
    request = read_json(body)
    if not isinstance(request, dict):
        raise BadRequestError('the body must be an object such as {"task": {"graph": "demo", "model": "gcn"}}')
    priority, limit = (check_option(name, request.get(name)) for name in ("priority", "time_limit"))
    most = options.time_limit
    if user != OPERATOR and (priority or 0) > options.max_priority:
        cap = f"users of this server may give at most {options.max_priority}"
        raise BadRequestError(f"priority={priority}: {cap}; lower it, or ask the operator to submit it", 403)
    if limit is not None and most is not None and limit > most:
        raise BadRequestError(f"time_limit={limit:g}: a task may run for at most {most:g} s here; lower it")
    new = read_submissions(request, registry, submitting_user(request, user), find)
    RunOptions.of(**new[0].spec.get("options", {})).check_device(options.device_names()[0].partition(":")[0])
    new = [replace(submission, by=user or THE_OPERATOR) for submission in new]
    return new, sum(len(submission.text) for submission in new) + len(json.dumps(new[0].sweep or {}))


def read_submissions(body: Mapping[str, Any], registry: Registry, user: str, find: Find) -> list[Submission]:
    """Return the tasks of a request: of its ``task``, its ``tasks``, or its ``infer`` (an inference task)."""
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
        unread: dict[str, str] = {}
        specs = [_spec(task, registry, unread) for task in tasks]
        if sentence := next(filter(None, unread.values()), ""):  # one that some of the tasks read, all may have
            raise BadRequestError(sentence)
    options = _run_options(body, specs)
    after = tuple(dict.fromkeys(after))
    if len(specs) * len(after) > MOST_DEPENDENCIES:
        what = f"{len(specs):,} tasks that each wait for {len(after):,} others"
        most = f"a submission may have {MOST_DEPENDENCIES:,} dependencies"
        raise BadRequestError(f"{what} are too many; {most}: name fewer tasks in after, such as the last of a chain")
    key, priority, attempts = (check_option(name, body.get(name)) for name in ("key", "priority", "max_attempts"))
    # max_attempts is kept as it was sent: the number of the task rises when it is paused or its server ends.
    limits = {name: check_option(name, body.get(name)) for name in ("deadline", "time_limit")}
    limits |= {"max_attempts": attempts}
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
    """Return the description of a request's sweep; {} for several tasks without one, None for one task."""
    tasks, sweep = body.get("tasks"), body.get("sweep")
    if sweep is None:
        return {} if isinstance(tasks, list) and len(tasks) > 1 else None
    name = sweep.get("name") if isinstance(sweep, dict) else 0
    if not isinstance(tasks, list) or (name is not None and (not isinstance(name, str) or len(name) > LONGEST_TEXT)):
        shape = "an object such as weft.Sweep.to_dict() gives, given together with tasks"
        raise BadRequestError(f"sweep must be {shape}; its name has at most {LONGEST_TEXT} characters")
    if len(json.dumps(sweep)) > MOST_SETTINGS_BYTES:
        raise BadRequestError(f"sweep has more than {MOST_SETTINGS_BYTES:,} bytes; send its name alone", 413)
    return sweep


def _run_options(body: Mapping[str, Any], specs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the run options of a request as plain data, checked as :func:`weft.run` checks them for its tasks."""
    given = {name: body[name] for name in RUN_OPTIONS if body.get(name) is not None}
    options = RunOptions.of(**given)
    plain = options.for_queue
    if given.keys() - {"budget"}:
        if body.get("infer") is not None:
            raise BadRequestError(f"{option(*next(iter(given.items())))} is for trainings; leave it out")
        options.check_tasks([Task.from_dict(spec["task"]) for spec in specs])
    return plain


def _spec(task: Any, registry: Registry, unread: dict[str, str]) -> dict[str, Any]:
    """Return the spec of one task: its settings, checked by :class:`weft.Task`, and the path of its graph if any."""
    if not isinstance(task, dict):
        raise BadRequestError("a task must be an object of settings")
    usual = (("name", None), ("mode", "auto"))  # an open mode is decided by what else is given
    settings = {key: value for key, value in task.items() if (key, value) not in usual}
    if (size := len(json.dumps(settings))) > MOST_SETTINGS_BYTES:
        most = f"a task may have {MOST_SETTINGS_BYTES:,}"
        raise BadRequestError(f"the settings of a task have {size:,} bytes, and {most}; put data into the graph", 413)
    for key, value in settings.items():
        if key not in ("model_args", "fanout") and varies(key, value):
            raise BadRequestError(f"{key} lists several values; send each task of a sweep, as `weft submit` does")
    if "graph" in settings and not isinstance(settings["graph"], str):
        raise BadRequestError("graph must be a name or a path inside the graphs folder")
    if not isinstance(settings.get("model", "gcn"), str):
        raise BadRequestError("model must be a name")
    name = settings.get("name")
    if name is not None and (not isinstance(name, str) or len(name) > LONGEST_TEXT):
        raise BadRequestError(f"name must be a text of at most {LONGEST_TEXT} characters")
    try:
        checked = Task.from_dict(settings)
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        raise BadRequestError(f"the task cannot be read ({type(error).__name__}: {str(error)[:120]})") from None
    # A sentence for one that no task so far reads; a user's model may read any.
    for setting, value in ((name, value) for name, value in settings.items() if unread.get(name) != ""):
        why = checked.why_ignored(setting)
        if why is None:
            unread[setting] = ""
        elif value != PLAIN[setting]:
            unread.setdefault(setting, f"task {checked.label!r}: {setting}={value!r} would have no effect: {why}")
    if checked.split == ALL_SPLITS:
        raise BadRequestError("split='all' is for weft.run; send a task per split, with its number")
    registry.check_model(settings.get("model", "gcn"))
    registry.check_functions(settings)
    path = registry.graph_path(settings.get("graph"))
    return {"task": settings} if path is None else {"task": settings, "graph_path": path}


def given_settings(task: Task) -> dict[str, Any]:
    """Return the settings that a task gives as plain data; refuses a graph, model or function given as an object."""
    every = task.to_dict()
    for key in ("graph", "model"):
        if every[key].startswith("<"):
            raise InputError(f"task {task.label!r}: its {key} is an object, which cannot be sent; give a name or path")
    functions = [(name, getattr(task, name)) for name in OWN_FUNCTIONS]
    for key, value in (*functions, *(("callbacks", callback.call) for callback in task.callbacks)):
        if not isinstance(value, str):
            raise InputError(
                f"task {task.label!r}: its {key} is a function, which cannot be sent; name it, as module:function"
            )
    return {name: every[name] for name in sorted(task.given) if every.get(name) is not None}


# ---- Users never see the server's folders: paths in answers are relative to the folder of graphs or of runs.


class HiddenPaths:
    """Leaves ``roots`` out of the paths inside them."""

    def __init__(self, *roots: Path | None) -> None:
        paths = [path for root in roots if root is not None for path in (root.absolute(), root.resolve())]
        plain = [f"{path}/" for path in dict.fromkeys(paths) if len(path.parts) > 1]
        escaped = [json.dumps(root, ensure_ascii=ascii)[1:-1] for root in plain for ascii in (False, True)]
        self._roots = list(dict.fromkeys([*plain, *escaped]))

    def text(self, text: str) -> str:
        """``text``, which may be JSON, without the roots."""
        for root in self._roots:
            text = text.replace(root, "")
        return text

    def data(self, value: Any) -> Any:
        """Plain data without the roots, also in names."""
        return json.loads(self.text(json.dumps(value, ensure_ascii=False)))
