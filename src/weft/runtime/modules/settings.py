"""Which settings a model reads: from its traits row if it is built in, from its signature if it is a user's.

A setting that was given and that nothing reads would be reported as if it had been tried, so it is refused.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.core.changed_modules import STAMP, import_current
from weft.core.errors import SpecError, WeftError
from weft.core.settings import identity
from weft.core.task import (
    ALIASES,
    ELSEWHERE,
    LOOP_SETTINGS,
    OPTIMIZER_GIVEN,
    OPTIMIZER_SETTINGS,
    SAMPLING_SETTINGS,
    Task,
    model_settings,
    name_of,
    takes,
)
from weft.core.wording import nearest_names
from weft.graph.graph import Graph
from weft.nn.models import check_options, check_row, known_models
from weft.ops.csr.adjacency import Adjacency

# ---- Import what ``"package.module:name"`` or ``"path/file.py:name"`` points to.


def function_of(task: Task, setting: str) -> Callable[..., Any]:
    """The user's own callable that ``setting`` is, or that it names as :func:`import_from` reads it."""
    value: Any = getattr(task, setting)
    return import_from(task.label, setting, value) if isinstance(value, str) else value


def import_from(label: str, setting: str, reference: str) -> Callable[..., Any]:
    """What ``"package.module:name"`` or ``"path/file.py:name"``, the value of ``setting``, points to."""
    module_name, _, name = reference.rpartition(":")
    where = f"task {label!r}: {setting}={reference!r}"
    if not module_name or not name:
        raise SpecError(f'{where} must be "module:callable" or "file.py:callable" with both parts')
    try:
        module = _load_file(Path(module_name)) if module_name.endswith(".py") else import_current(module_name)
    except Exception as error:
        raise SpecError(f"{where}: {in_words(error)}") from error
    target = getattr(module, name, None)
    if not callable(target):
        raise SpecError(f"{where}: {module_name} has no callable {name!r}")
    return target  # type: ignore[no-any-return]


def in_words(error: Exception, *skipped_files: str) -> str:
    """An error in a user's code in words, with the line; ``skipped_files``: files of Weft to skip."""
    if isinstance(error, (ImportError, FileNotFoundError)):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_ours = last.filename in (__file__, *skipped_files) or isinstance(error, SyntaxError)
    where = "" if is_ours else f" (line {last.lineno} of {last.filename})"
    return f"{type(error).__name__}: {error}{where}"


def _load_file(path: Path) -> Any:
    """The module of a file; one that was loaded before is loaded again if the file has changed since."""
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    # A name of its own for every file: two users' ``net.py`` are two modules, and a ``numpy.py`` is not NumPy.
    name = f"weft_file_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}_{path.stem}"
    status = path.stat()
    stamp = status.st_mtime_ns, status.st_size
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, STAMP, None) == stamp:
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"no such file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that classes defined there can be copied and pickled
    with ExitStack() as failed:
        failed.callback(sys.modules.pop, name)
        spec.loader.exec_module(module)
        failed.pop_all()
    setattr(module, STAMP, stamp)
    return module


SIZES = (("in_features", "out_features"), ("in_channels", "out_channels"))
RELATIONS = "num_relations"
DEFAULTS = {f.name: f.default_factory() if f.default is MISSING else f.default for f in fields(Task)}  # type: ignore[misc]


@dataclass(frozen=True)
class Signature:
    """What a callable that builds a model takes besides its two sizes.

    ``names``: parameters; ``required``: those without a default; ``open``: it has ``**kwargs``; ``sizes``: what the
    parameters are called that get the two sizes; ``by_name``: they are one of :data:`SIZES`, wherever they stand;
    ``shown``: as it is written.
    """

    names: tuple[str, ...]
    required: tuple[str, ...]
    open: bool
    by_name: bool
    shown: str
    sizes: tuple[str, ...] = ()

    def parameter_for(self, setting: str) -> str | None:
        """What the parameter is called that gets a setting of a task, by Weft's name or PyG's; None without one."""
        named = (setting, *(alias for alias, name in ALIASES.items() if name == setting))
        return next((name for name in named if name in self.names), setting if self.open else None)


def signature_of(factory: Callable[..., Any]) -> Signature:
    """What ``factory(in_features, out_features, ...)`` takes."""
    called = str(getattr(factory, "__name__", type(factory).__name__))
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # written in C: it is called with the two sizes alone
        return Signature((), (), False, False, f"{called}(...)")
    kinds, parameters = inspect.Parameter, list(signature.parameters.values())
    bare = [p.replace(annotation=kinds.empty) for p in parameters]
    shown = signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    named = [p for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    by_name = next((pair for pair in SIZES if set(pair) <= {p.name for p in named}), None)
    positional = [p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    sizes = by_name or tuple(positional[:2])
    free = [p for p in named if p.name not in sizes]
    return Signature(
        tuple(p.name for p in free),
        tuple(p.name for p in free if p.default is kinds.empty),
        any(p.kind is kinds.VAR_KEYWORD for p in parameters),
        by_name is not None,
        f"{called}{shown}",
        sizes,
    )


def arguments(task: Task, signature: Signature, num_relations: int = 0) -> dict[str, Any]:
    """The arguments of a user's callable: settings of the task by name, and ``model_args``.

    A setting that the task leaves at its default is left to the callable's own default, if it has one. The number of
    the graph's relations is given to a callable that cannot do without.
    """
    settings = {signature.parameter_for(name): getattr(task, name) for name in task.given_to_model()}
    needed = {name: ALIASES.get(name, name) for name in signature.required if name not in task.model_args}
    settings |= {name: getattr(task, needed[name]) for name in needed if needed[name] in model_settings()}
    if RELATIONS in needed and num_relations:
        settings[RELATIONS] = num_relations
    return {name: value for name, value in settings.items() if name is not None} | task.model_args


def refused_argument(error: BaseException) -> str:
    """What a class has that was called with an argument which it, or a class that it calls, does not have.

    Empty for any other error. Classes of PyG hand ``**kwargs`` on to their layers: the constructors on the way to the
    error say which names there are.
    """
    match = re.search(r"got an unexpected keyword argument '(\w+)'", str(error))
    if match is None or not isinstance(error, TypeError):
        return ""
    names: dict[str, None] = {}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_name == "__init__":
            names |= dict.fromkeys(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])
    listed = [name for name in names if not any(name in pair for pair in SIZES)]
    if not listed:
        return ""
    own = ELSEWHERE.get(match[1])
    hint = nearest_names(match[1], listed) or nearest_names(match[1], DEFAULTS.keys() - {match[1]})
    hint = f" (did you mean {own!r}?)" if own else hint
    return f"it has no argument {match[1]!r}{hint}; it has {', '.join(listed)}"


def check_tasks(tasks: Sequence[Task]) -> None:
    """A :class:`SpecError` for settings that nothing reads, and for seeds that would all begin with equal weights.

    A value equal to the default is harmless. So is a setting that is the same for all tasks and that some of them
    read: ``Sweep(model=["gcn", "gat"], heads=4)``.
    """
    signatures: dict[Hashable, Signature | None] = {}
    for task in tasks:
        key = identity(task.model)
        if key not in signatures:
            signatures[key] = _signature(task)
            if task.traits is not None:  # a plug-in's row is not checked before
                check_row(f"model={task.model!r}", task.traits, known_models()[task.model])
        _check_arguments(task, signatures[key])
        if task.has_own("optimizer"):
            _check_optimizer(task)
    named = (*OPTIMIZER_SETTINGS, *LOOP_SETTINGS, *sorted(SAMPLING_SETTINGS), "convert")
    for name in (*model_settings(), *named):
        read = []
        for task in tasks:
            signature = signatures[identity(task.model)]
            by_name = name in named or task.traits is not None
            takes_it = signature is not None and signature.parameter_for(name) is not None
            read.append(not task.ignores(name) if by_name else takes_it)
        shared = any(read) and len({identity(getattr(task, name)) for task in tasks}) == 1
        for task, is_read in zip(tasks, read, strict=True):
            if is_read or shared or getattr(task, name) == DEFAULTS[name]:
                continue
            signature = signatures[identity(task.model)]
            why = task.why_ignored(name)
            if why is None and signature is not None:
                why = f"{signature.shown} has no parameter {name!r}; add it there, or leave {name} out"
            elif why is None:
                why = f"the model is a {task.model_name} that is already built; give its class, "
                why += "or a function that builds it"
            why += "; give it only to those that read it, with tasks=[{...}, ...]" if any(read) else ""
            value = getattr(task, name)
            raise SpecError(f"task {task.label!r}: {name}={value!r} would have no effect: {why}")
    seeds: dict[int, Task] = {}
    for task in tasks:  # seeds of one module, which would all begin with the weights that it has
        if isinstance(task.model, nn.Module) and task.init != "fresh":
            first = seeds.setdefault(id(task.model), task)
            if task.seed != first.seed:
                raise SpecError(
                    f"task {task.label!r}: seed={task.seed} and seed={first.seed} of one {task.model_name} object "
                    'would begin with the same weights; give its class, or init="fresh" to draw new ones for every seed'
                )


def _signature(task: Task) -> Signature | None:
    """The signature of a user's callable; None for a named model and for a module that is already built."""
    if task.traits is not None or isinstance(task.model, nn.Module):
        return None
    try:
        return signature_of(function_of(task, "model"))
    except SpecError:  # the task fails when its model is built, and costs the others nothing
        return Signature((), (), True, False, task.model_name)


def _check_optimizer(task: Task) -> None:
    """Settings that are given and that an optimizer of the user's own does not take."""
    try:
        make = function_of(task, "optimizer")
    except SpecError:  # the task fails when it begins, and costs the others nothing
        return
    for name in OPTIMIZER_GIVEN:
        if name in task.given and not takes(make, name):
            raise SpecError(
                f"task {task.label!r}: {name}={getattr(task, name)!r} would have no effect: optimizer "
                f"{name_of(make)} does not take {name}"
            )
    if task.decay != "all":
        raise SpecError(
            f"task {task.label!r}: decay={task.decay!r} is for Weft's own optimizers; give weight_decay per group in "
            "param_groups"
        )


def _check_arguments(task: Task, signature: Signature | None) -> None:
    """Names of ``model_args`` that the model does not have, and a width where the number of classes is given."""
    second = signature.sizes[1] if signature is not None and len(signature.sizes) > 1 else ""
    if signature is not None and "hid" in second.lower():
        raise SpecError(
            f"task {task.label!r}: {signature.shown} would get out_features as {second!r}: a model is called with "
            "(in_features, out_features); give a function of these two that builds it, or call its parameters so, or "
            "in_channels and out_channels"
        )
    if not task.model_args:
        return
    where = f"task {task.label!r}: model_args"
    if task.traits is not None:
        try:
            check_options(task.model, task.model_args)
        except SpecError as error:
            raise SpecError(f"{where}: {error}") from None
    elif signature is None:
        raise SpecError(f"{where}: the model is a {task.model_name} that is already built; give its class instead")
    else:
        read = {signature.parameter_for(name): name for name in task.given_to_model()}
        for name in task.model_args:
            if name in signature.sizes:
                what = "features" if name == signature.sizes[0] else "classes"
                raise SpecError(f"{where}: {name} is the number of {what} of the graph; leave it out")
            if name in read:
                raise SpecError(
                    f"{where}: {read[name]}={getattr(task, read[name])!r} is {name} of the model; give it once"
                )
            if not signature.open and name not in signature.names:
                hint = nearest_names(name, signature.names) or nearest_names(name, DEFAULTS)
                raise SpecError(f"{where}: {signature.shown} has no parameter {name!r}{hint}")


# ---- Errors of a user's module in one sentence, with the line of the user's code that they come from.

_WEFT = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})


@contextmanager
def model_errors(task: Task, graph: str) -> Iterator[None]:
    """Inside, errors of the model of ``task`` become one sentence that names the task and the graph."""
    try:
        yield
    except (WeftError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise SpecError(
            f"task {task.label!r}: model {task.model_name} failed on graph "
            f"{graph!r}: {in_one_line(error)} ({place_of(error, task.model)})"
        ) from error


def in_one_line(error: BaseException) -> str:
    """The kind of the error and the first line of what it says."""
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0] if words else ''}"


def place_of(error: BaseException, model: Any) -> str:
    """The innermost line of the user's own; of a library that is not torch; else where the model is defined."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_file()]
    outside = [frame for frame in frames if not frame.filename.startswith((_WEFT, _TORCH))]
    users = [frame for frame in outside if is_own_file(frame.filename)]
    for candidates in (users, outside):
        if candidates:
            return f"line {candidates[-1].lineno} of {candidates[-1].filename}"
    if isinstance(model, str):
        return f"model {model!r}"
    thing = model if inspect.isclass(model) or inspect.isroutine(model) else type(model)
    with suppress(OSError, TypeError):
        kind = "class" if inspect.isclass(thing) else "function"
        return f"its {kind} is at line {inspect.getsourcelines(thing)[1]} of {inspect.getsourcefile(thing)}"
    return "no line of it is on the way, as in a backward pass"


def is_own_file(name: str) -> bool:
    """Whether a file is of the user's own code: not Weft's, nor one of Python's or of an installed library."""
    return not name.startswith((_WEFT, _TORCH, *_INSTALLED)) and Path(name).is_file()


# ---- How a user's module is called, by the names of the parameters of its ``forward``.
#
# - ``"features"``: ``forward(x)``; ``"edges"``: PyG's ``forward(x, edge_index)``, with :data:`OF_EDGES`;
# - ``"transposed"``: PyG's ``forward(x, adj_t)``; ``"data"``: PyG's ``forward(data)``;
# - ``"adjacency"``: Weft's ``forward(x, adj)``, whatever the second one is called.

EDGES, TRANSPOSED = "edge_index", "adj_t"
OF_EDGES = ("edge_weight", "edge_type", "edge_attr")  # what a graph may have one of per edge
GIVEN = {
    "features": "x",
    "edges": "x, edge_index, edge_weight, edge_type and edge_attr",
    "transposed": "x and adj_t",
    "data": "data",
    "adjacency": "x and the adjacency",
}
STARS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def parameters_of(model: nn.Module) -> dict[str, inspect.Parameter]:
    """The parameters of ``forward`` by name."""
    return dict(inspect.signature(model.forward).parameters)


def call_style(model: nn.Module) -> str:
    """One of the styles above."""
    parameters = parameters_of(model)
    names = list(parameters)
    if names[:1] == ["data"] and not any(name in parameters for name in (EDGES, TRANSPOSED)):
        return "data"
    if len(names) < 2 or parameters[names[1]].kind in STARS:
        return "features"
    return {EDGES: "edges", TRANSPOSED: "transposed"}.get(names[1], "adjacency")


def edge_values(adj: Adjacency) -> list[str]:
    """Which of :data:`OF_EDGES` the edges have."""
    values = zip(OF_EDGES, (adj.weight, adj.relation, adj.edge_attr), strict=True)
    return [name for name, value in values if value is not None]


def check_call(task: Task, model: nn.Module, adj: Adjacency) -> None:
    """A :class:`SpecError` if ``forward`` needs more than Weft gives."""
    style, parameters = call_style(model), parameters_of(model)
    fixed = 1 if style in ("features", "data") else 2
    aggregates = ("first", "layer") if hasattr(model, "first_aggregate") else ()
    possible = {"edges": edge_values(adj), "adjacency": aggregates}.get(style, ())
    for name, parameter in list(parameters.items())[fixed:]:
        needed = parameter.default is inspect.Parameter.empty and parameter.kind not in STARS
        if needed and name not in possible:
            code = getattr(model.forward, "__code__", None)
            where = "" if code is None else f" (line {code.co_firstlineno} of {code.co_filename})"
            why = f"it is called with {GIVEN[style]}; give the parameter a default"
            if style == "edges" and name in OF_EDGES:
                why = "the edges of this graph have none; give the graph one, or the parameter a default"
            forward = f"forward({', '.join(parameters)}) of {type(model).__name__}{where}"
            raise SpecError(f"task {task.label!r}: {forward} needs {name!r}: {why}")


# ---- Say what a model does not read of a graph's edges, and refuse what it cannot do with them.


def unread_edges(task: Task, model: nn.Module, graph: Graph) -> list[str]:
    """Remarks on weights and features of edges that the graph has and the model does not read."""
    if task.traits is None and call_style(model) != "edges":  # nothing says what it reads
        return []
    named = parameters_of(model)
    reads_weight = "edge_weight" in named if task.traits is None else task.traits.weighted
    reads_weight = reads_weight and getattr(model, "supports_edge_weight", True)  # PyG's classes all have the parameter
    reads_attr = task.traits is None and "edge_attr" in named and getattr(model, "supports_edge_attr", True)
    notes = []
    if graph.edge_weight is not None and not reads_weight:
        notes.append(f"{task.model_name} does not read the edge weights of graph {graph.name!r}")
    same = graph.edge_attr is not None and graph.edge_attr.numel() == graph.num_edges and graph.edge_weight is not None
    if graph.edge_attr is not None and not reads_attr and not (same and reads_weight):
        notes.append(f"{task.model_name} does not read the edge features of graph {graph.name!r}")
    return notes


def given_of_edges(task: Task, model: nn.Module, adj: Adjacency) -> tuple[str, ...]:
    """What the model is given per edge, of what the edges have."""
    if task.traits is not None:
        return ()
    style, parameters = call_style(model), parameters_of(model)
    taken = {"data": OF_EDGES, "edges": tuple(parameters), "transposed": ("edge_weight",)}.get(style, ())
    return tuple(name for name in edge_values(adj) if name in taken)


def check_edges(task: Task, graph: Graph) -> None:
    """A :class:`SpecError` for a model that cannot divide by what the edges weigh: GCN, by roots of degrees."""
    weight = graph.edge_weight
    if task.model != "gcn" or weight is None or weight.is_meta or not bool((weight < 0).any()):
        return
    rows, loops = graph.adj.rows().long(), graph.adj.rows() == graph.adj.indices
    degree = torch.ones(graph.num_nodes, dtype=weight.dtype, device=weight.device)
    degree[rows[loops]] = 0.0
    degree.index_add_(0, rows, weight)
    if bool((degree < 0).any()):
        node = int((degree < 0).nonzero()[0])
        raise SpecError(
            f"task {task.label!r}: the weights of the edges into node {node} of graph {graph.name!r} sum to "
            f"{float(degree[node]):.4g} with its self loop; GCN divides by the square root of that: use weights that "
            "are not negative, or another model"
        )
