"""Rule: check a field of a task and say what it may hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, partial
from numbers import Integral, Real
from typing import Any

from weft.core.errors import InputError, SpecError
from weft.core.graph_stats import GraphStats
from weft.core.wording import brief, option


@dataclass(frozen=True)
class Rule:
    """The values that a field accepts: a kind, bounds or choices, and the section of a spec file that it stands in."""

    kind: type
    section: str = "train"
    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    optional: bool = False
    accepts: Callable[[Any], bool] | None = None  # other values that are taken as they are, such as users' functions
    described: str = ""  # what is expected, in words; with choices: what else ``accepts`` takes
    parse: Callable[[Any, str], Any] | None = None  # makes the value of what the user wrote ("24GiB"), by its name

    def check(self, where: str, name: str, value: Any) -> Any:
        """``value`` in its proper type, or a :class:`SpecError` that begins with ``where`` and names it."""
        if (value is None and self.optional) or (self.accepts is not None and self.accepts(value)):
            return value
        if self.parse is not None:
            return self.parse(value, f"{where}{name}")
        if where and isinstance(value, (list, tuple, range)):
            raise SpecError(f"{where}{name}={list(value)!r} is a list; a task has one value for each setting")
        numeric = {int: Integral, float: Real}.get(self.kind)
        shown = f"{where}{name}={brief(value)}" if where else option(name, value)  # which a shell writes differently
        if not isinstance(value, numeric or self.kind) or (numeric is not None and isinstance(value, bool)):
            raise SpecError(f"{shown} must be {self.expected()}")
        try:
            typed = self.kind(value)
        except OverflowError:  # a whole number beyond all floats
            raise SpecError(f"{shown} must be {self.expected()}") from None
        complaint = self._complaint(typed)
        if complaint and self.described:
            raise SpecError(f"{shown} must be {self.expected()}")
        if complaint:
            raise SpecError(f"{f'{where}{name}={typed!r}' if where else shown} {complaint}")
        return typed

    def _complaint(self, value: Any) -> str:
        if self.choices:
            return "" if value in self.choices else f"must be {self.expected()}"
        if self.kind is str:
            try:  # half a surrogate pair and a zero byte cannot be written everywhere
                fine = b"\0" not in value.encode()
            except UnicodeEncodeError:
                fine = False
            return "" if fine else "must be text that a file can hold"
        if self.kind is bool:
            return ""
        if not math.isfinite(value):
            return "must be a finite number"
        if self.low is not None and value < self.low:
            return f"must be at least {self.low:g}"
        if self.above is not None and value <= self.above:
            return f"must be above {self.above:g}"
        if self.high is not None and value > self.high:
            return f"must be at most {self.high:,}"
        if self.below is not None and value >= self.below:
            return f"must be below {self.below:g}"
        return ""

    def expected(self) -> str:
        """What a value should be, in words."""
        if self.choices:
            listed = "one of " + ", ".join(self.choices) if len(self.choices) > 1 else repr(self.choices[0])
            return listed + (f", or {self.described}" if self.described else "")
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
        return (self.described or words[self.kind]) + (" (or left out)" if self.optional and not self.described else "")


def is_reference(value: Any) -> bool:
    """Whether ``value`` says where a function is: ``"package.module:name"`` or ``"path/file.py:name"``."""
    return isinstance(value, str) and ":" in value and not value.startswith("<")


def setting(default: Any, kind: type, **limits: Any) -> Any:
    """A dataclass field with a :class:`Rule`; ``default=None`` makes it optional, ``dict`` or ``tuple`` empty."""
    metadata = {"rule": Rule(kind, optional=default is None, **limits)}
    if default in (dict, tuple):  # not hashed: what users put into them may have no hash
        return field(default_factory=default, hash=False, metadata=metadata)
    return field(default=default, metadata=metadata)


def choice(default: str | None, *choices: str, section: str = "train") -> Any:
    """A dataclass field that holds one of ``choices``."""
    return setting(default, str, choices=choices, section=section)


def open_choice(default: str, *choices: str) -> Any:
    """A dataclass field that holds one of ``choices``, or a function of the user's own."""
    functions = 'a function ("file.py:function" in a file)'
    accepts = lambda value: callable(value) or is_reference(value)  # noqa: E731
    return setting(default, str, choices=choices, accepts=accepts, described=functions)


# ---- Callback: a user's function that is called after stated epochs and may end a task or change its learning rate.


@dataclass(frozen=True)
class Callback:
    """Calls ``call(context)`` after every ``every``-th epoch, and after the epochs ``at`` (counted from 1).

    ``call``: a function that takes a :class:`CallbackContext`, or ``"file.py:function"``.
    """

    call: Any
    every: int | None = None
    at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not callable(self.call) and not is_reference(self.call):
            raise SpecError(
                f'Callback: call={self.call!r} must be a function of a weft.CallbackContext, or "file.py:function"'
            )
        at = (self.at,) if isinstance(self.at, int) else tuple(self.at)
        for name, value in [("every", self.every), *(("at", epoch) for epoch in at)]:
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise SpecError(f"Callback: {name}={value!r} must be a number of epochs, at least 1")
        if self.every is None and not at:
            raise SpecError("Callback: say when, with every=10 or at=[5, 20]")
        object.__setattr__(self, "at", at)

    def is_due(self, epoch: int) -> bool:
        """Whether it is called after ``epoch`` (counted from 1)."""
        return epoch in self.at or (self.every is not None and epoch % self.every == 0)

    def next_after(self, epoch: int) -> int | None:
        """The next epoch after which it is called; None if there is none."""
        epochs = [each for each in self.at if each > epoch]
        epochs += [] if self.every is None else [(epoch // self.every + 1) * self.every]
        return min(epochs, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; a function becomes a description of it."""
        call = (
            self.call if isinstance(self.call, str) else f"<{getattr(self.call, '__name__', type(self.call).__name__)}>"
        )
        return {"call": call, "every": self.every, "at": list(self.at)}


@dataclass
class CallbackContext:
    """A task after one of its epochs, as a callback sees it.

    ``task``: its name; ``epoch``: counted from 1; ``history``: a list per column, NaN where nothing was measured;
    ``model``: a copy of the model as it is now; ``gradient_norm``: of its last step. :meth:`stop` ends the task here,
    :meth:`scale_lr` changes its rate from the next step on, :meth:`log` records numbers.
    """

    task: str
    epoch: int
    history: Mapping[str, Sequence[float]]
    make_model: Callable[[str], Any] | None = field(default=None, repr=False)
    read_gradient_norm: Callable[[str], float] | None = field(default=None, repr=False)
    logged: dict[str, float] = field(default_factory=dict, init=False)
    factor: float = field(default=1.0, init=False)
    reason: str | None = field(default=None, init=False)

    @cached_property
    def model(self) -> Any:
        """The ``nn.Module`` with its current weights, in evaluation mode: a copy, so writing to it changes nothing."""
        if self.make_model is None:
            raise SpecError(f"task {self.task!r}: a callback reads the model, which is not in this process")
        return self.make_model(self.task)

    @cached_property
    def gradient_norm(self) -> float:
        """The norm of the loss's gradient by all weights in the last step, before clipping and weight decay."""
        if self.read_gradient_norm is None:
            raise SpecError(f"task {self.task!r}: a callback reads the gradient, which is not in this process")
        return self.read_gradient_norm(self.task)

    def __getitem__(self, column: str) -> float:
        """What was measured last in a column, such as ``"val_loss"``."""
        if column not in self.history:
            raise SpecError(f"a callback reads {column!r}; the columns are {', '.join(self.history)}")
        return self.history[column][-1]

    def stop(self, reason: str = "") -> None:
        """End the task after this epoch; ``reason`` is shown with it."""
        self.reason = str(reason)

    def scale_lr(self, factor: float) -> None:
        """Multiply the rate of every later step by ``factor``."""
        if not isinstance(factor, (int, float)) or isinstance(factor, bool) or not 0 <= factor < float("inf"):
            raise SpecError(f"scale_lr({factor!r}): the factor must be a number, at least 0")
        self.factor *= factor

    def log(self, **values: Any) -> None:
        """Record numbers after this epoch, by name: in an event of kind ``log``, and in ``result.logged``."""
        for name, value in values.items():
            number = number_in(value)
            if name in self.history or name == "epoch":
                raise SpecError(f"log({name}=...): {name} is a column of the history; choose another name")
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                raise SpecError(f"log({name}={value!r}): must be a number")
            self.logged[name] = float(number)


def read_callbacks(value: Any, name: str) -> tuple[Callback, ...]:
    """``callbacks=``: one :class:`Callback` or several, or tables of a spec file that say the same."""
    callbacks = []
    for callback in () if value is None else value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(callback, Mapping) and set(callback) <= {"call", "every", "at"} and "call" in callback:
            callback = Callback(**callback)
        if not isinstance(callback, Callback):
            raise SpecError(
                f"{name} has {callback!r}; expected weft.Callback(function, every=10), or in a spec "
                'file { call = "file.py:function", every = 10 }'
            )
        callbacks.append(callback)
    return tuple(callbacks)


# ---- FunctionRef: stands for a function in a task that was read from a file, which can hold its name only.


@dataclass(frozen=True)
class FunctionRef:
    """A function that was given as an object and is called ``<name>`` in a file; it cannot be called."""

    name: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *_: Any, **__: Any) -> Any:
        """A :class:`SpecError` that says why."""
        raise SpecError(
            f"{self.name} was given as an object, which a file cannot hold; give the task again to train it"
        )


# ---- Fan-outs: how many neighbours a sampler takes per hop, of all relations together or of each.
#
# A hop is a number (of all relations together; -1: all neighbours), a list with a number per relation, or a mapping
# from relations to numbers, where ``each`` stands for those that are not named (0 otherwise). Tasks keep a mapping as
# sorted pairs, which can be hashed.

EACH = "each"
MOST_PICKS = 10_000_000  # of a hop: as many as anything that is counted
Pairs = tuple[tuple[int | str, int], ...]
Hop = int | tuple[int, ...] | Pairs
SHAPE = (
    "must list neighbours per hop, such as [15, 10, 5] (-1: all), or per hop and relation, such as "
    '[{"each": 3}, {"0": 5, "2": -1}]'
)


def read_fanout(fanout: Any, name: str = "fanout") -> tuple[Hop, ...]:
    """The fan-outs of a task as it keeps them, or a :class:`SpecError` that begins with ``name``."""
    listed = isinstance(fanout, (list, tuple)) and fanout
    hops = tuple(hop for hop in map(_read_hop, fanout) if hop is not None) if listed else ()
    if not hops or len(hops) < len(fanout):
        raise SpecError(f"{name}={fanout!r} {SHAPE}")
    counts = [part for hop in hops for part in ((hop,) if isinstance(hop, int) else hop)]
    most = max(part[1] if isinstance(part, tuple) else part for part in counts)
    if most > MOST_PICKS:
        raise SpecError(f"{name}={fanout!r}: {most:,} neighbours are more than {MOST_PICKS:,}; -1 takes all")
    return hops


def _read_hop(hop: Any) -> Hop | None:
    """One hop in the form that is kept; None if it is not one."""
    if _is_count(hop):
        return hop if hop == -1 or hop >= 1 else None
    if not isinstance(hop, (list, tuple, Mapping)) or not hop:
        return None
    pairs = list(hop.items()) if isinstance(hop, Mapping) else hop
    if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        return tuple(hop) if all(_is_count(k) and k >= -1 for k in hop) and any(hop) else None
    counts: dict[int | str, int] = {}
    for key, count in pairs:
        name = int(key) if isinstance(key, str) and key.isdecimal() else key
        if not (name == EACH or (_is_count(name) and name >= 0)) or not _is_count(count) or count < -1:
            return None
        counts[name] = count
    return tuple(sorted(counts.items(), key=lambda pair: (pair[0] != EACH, pair[0]))) if any(counts.values()) else None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def plain_hop(hop: Hop) -> Any:
    """A hop for JSON, which :func:`read_fanout` reads back."""
    if isinstance(hop, int):
        return hop
    return {str(key): count for key, count in hop} if isinstance(hop[0], tuple) else list(hop)


def show_hop(hop: Hop) -> str:
    """A hop in words."""
    if isinstance(hop, int):
        return "all" if hop < 0 else str(hop)
    if not isinstance(hop[0], tuple):
        return f"{', '.join(show_hop(count) for count in hop)} by relation"
    words = (f"{show_hop(k)} {'of each relation' if r == EACH else f'of relation {r}'}" for r, k in hop)
    return " and ".join(words)


def resolve(
    fanouts: Sequence[Any], num_relations: int, relation_edges: Sequence[int]
) -> tuple[int | tuple[int, ...], ...]:
    """Every hop as a number, or as a number per relation of a graph; an :class:`InputError` if that does not fit."""
    resolved: list[Any] = []
    for hop in read_fanout(list(fanouts)):
        if isinstance(hop, int):
            resolved.append(hop)
            continue
        if not num_relations:
            raise InputError("fan-outs per relation need a graph whose edges have relations; give one number per hop")
        if not isinstance(hop[0], tuple):
            if len(hop) != num_relations:
                raise InputError(f"a hop of fanout has {len(hop)} numbers, but the graph has {num_relations} relations")
            resolved.append(hop)
            continue
        counts: dict[int | str, int] = dict(hop)
        for relation, count in counts.items():
            if isinstance(relation, int) and relation >= num_relations:
                last = num_relations - 1
                raise InputError(f"fanout names relation {relation}, but the graph has relations 0 to {last}")
            if isinstance(relation, int) and count and relation_edges and not relation_edges[relation]:
                raise InputError(f"fanout names relation {relation}, of which the graph has no edges; leave it out")
        resolved.append(tuple(counts.get(relation, counts.get(EACH, 0)) for relation in range(num_relations)))
    return tuple(resolved)


def most_picks(hop: int | tuple[int, ...]) -> int:
    """Neighbours that a node has at most in a resolved hop; -1: as many as there are."""
    if isinstance(hop, int):
        return hop
    return -1 if min(hop) < 0 else sum(hop)


def picks_per_hop(fanouts: Sequence[Hop], stats: GraphStats) -> list[int]:
    """Neighbours that a node of a graph has at most in every hop; -1: as many as there are."""
    hops = resolve(fanouts, stats.num_relations, stats.relation_edges) if fanouts else ()  # no hop leads on from seeds
    return [most_picks(hop) for hop in hops]


# ---- Read the settings of the training loop that are more than a number: class weights, parameter groups, plateau.

# Of schedule="plateau", as torch's ReduceLROnPlateau calls them; ``watch``: the column that should improve.
PLATEAU = {"factor": 0.1, "patience": 10, "threshold": 1e-4, "cooldown": 0, "min_lr": 0.0, "watch": "val_loss"}
PLATEAU_RULES = {
    "factor": Rule(float, above=0, below=1, described="above 0 and below 1"),
    "patience": Rule(int, low=0, described="a number of evaluations"),
    "threshold": Rule(float, low=0, described="a number of at least 0"),
    "cooldown": Rule(int, low=0, described="a number of evaluations"),
    "min_lr": Rule(float, low=0, described="a number of at least 0"),
    "watch": Rule(str, described="the name of a column, such as val_loss"),
}
GROUP_SETTINGS = ("lr", "weight_decay")  # what a group of parameters may have of its own with Weft's optimizers
LOWER = ("mse", "mae")  # metrics of which less is better


def lower_is_better(column: str) -> bool:
    """Whether less is better of a column such as ``val_loss``, ``test_mse`` or ``seconds``."""
    return column.endswith("loss") or column.startswith("seconds") or column.partition("_")[2] in LOWER


def read_arguments(value: Any, name: str) -> dict[str, Any]:
    """Arguments by name, for a model or an optimizer of the user's own."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        short = name.rpartition(" ")[2]
        example = '{"width": 32}' if short == "model_args" else '{"alpha": 0.9}'
        raise SpecError(
            f"{name}={value!r} must be a dict by the names of the {short.removesuffix('_args')}'s own parameters, such "
            f"as {short}={example}"
        )
    return dict(value)


def read_betas(value: Any, name: str) -> tuple[float, ...]:
    """Two numbers, from 0 to below 1."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise SpecError(f"{name}={value!r} must be two numbers, such as [0.9, 0.999]")
    share = Rule(float, low=0, below=1)
    return tuple(share.check(name, f"[{i}]", beta) for i, beta in enumerate(value))


def read_class_weights(value: Any, name: str) -> str | tuple[float, ...]:
    """``"balanced"``, or one number per class, none below 0."""
    if isinstance(value, str) and value == "balanced":
        return value
    if hasattr(value, "tolist"):  # arrays of numpy and torch
        value = value.tolist()
    numbers = isinstance(value, (list, tuple)) and all(_is_number(weight) for weight in value)
    if not numbers or not value or min(value) < 0 or not any(value):
        raise SpecError(
            f'{name}={value!r} must be "balanced", or one number per class, at least 0 and '
            "not all 0, such as [1.0, 2.5]"
        )
    return tuple(float(weight) for weight in value)


def read_param_groups(value: Any, name: str) -> dict[str, dict[str, Any]]:
    """Settings by name pattern: ``{"conv1.*": {"weight_decay": 5e-4}}``; of several patterns the first one counts."""
    if value is None:
        return {}
    tables = isinstance(value, Mapping) and all(isinstance(one, Mapping) and one for one in value.values())
    if not tables or not all(isinstance(pattern, str) for pattern in value):
        raise SpecError(
            f"{name}={value!r} must be settings by name pattern, such as "
            'param_groups={"conv1.*": {"weight_decay": 5e-4}}'
        )
    return {pattern: dict(settings) for pattern, settings in value.items()}


def check_group_settings(label: str, groups: Mapping[str, Mapping[str, Any]]) -> None:
    """A :class:`SpecError` for settings that Weft's own optimizers do not have per group."""
    for pattern, settings in groups.items():
        for name, value in settings.items():
            if name not in GROUP_SETTINGS:
                allowed = " and ".join(GROUP_SETTINGS)
                raise SpecError(
                    f"task {label!r}: param_groups[{pattern!r}] has {name!r}; a group of Weft's own optimizers may "
                    f"set {allowed}; that of a torch.optim class, whatever the class takes"
                )
            if not _is_number(value) or value < 0:
                raise SpecError(f"task {label!r}: param_groups[{pattern!r}]: {name}={value!r} must be at least 0")


def group_of(name: str, groups: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The pattern of the group that the parameter ``name`` is in; None: in none."""
    return next((pattern for pattern in groups if fnmatchcase(name, pattern)), None)


def read_plateau(value: Any, name: str) -> dict[str, Any]:
    """The settings of ``schedule="plateau"`` that were given."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise SpecError(f"{name}={value!r} must be a table, such as plateau={{'patience': 5}}")
    for key, item in value.items():
        if key not in PLATEAU:
            raise SpecError(f"{name} has no {key!r}; it has {', '.join(PLATEAU)}")
        PLATEAU_RULES[key].check(f"{name}: ", key, item)
    return dict(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


# ---- Short, distinct labels for setting values (distinct unless that would make them long).

ARGS = "model_args."  # how the names of a model's own arguments begin among settings
MAX_LONG_NUMBERS = 12  # with more numbers, short labels are better than distinct ones


def identity(value: Any) -> Any:
    """A hashable stand-in for a value of a setting: equal for equal numbers and words, one for every other object."""
    if isinstance(value, (list, tuple)):
        return tuple(identity(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((key, identity(item)) for key, item in value.items())
    value = number_in(value)
    if isinstance(value, bool):
        return ("bool", value)
    if value is None or isinstance(value, (str, int, float)):
        return value
    return str(value) if hasattr(value, "__fspath__") else ("object", id(value))


def number_in(value: Any) -> Any:
    """The number in a scalar of numpy or torch; any other value as it is."""
    scalar = hasattr(value, "item") and not hasattr(value, "parameters") and getattr(value, "ndim", 1) == 0
    return value.item() if scalar else value


def describe(value: Any, digits: int = 3) -> str:
    """A value in few characters: numbers with ``digits`` significant ones, objects by their name."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "/".join(describe(item, digits) for item in value)
    if isinstance(value, Mapping):
        return "+".join(f"{key}:{describe(item, digits)}" for key, item in value.items())
    if isinstance(value, (str, int)):
        return str(value)
    try:
        return f"{value:.{digits}g}"
    except (TypeError, ValueError):
        return str(getattr(value, "name", None) or object_name(value, digits))


def object_name(value: Any, digits: int = 3) -> str:
    """A function or a class by its name, another object by its class; of a ``partial`` with the values it fixes."""
    if isinstance(value, partial):
        fixed = [describe(argument, digits) for argument in value.args]
        fixed += [f"{key}={describe(argument, digits)}" for key, argument in value.keywords.items()]
        return " ".join([object_name(value.func, digits), *fixed])
    return str(getattr(value, "__name__", type(value).__name__))


class Labels:
    """Words for the values of several settings: ``values`` lists what each setting takes."""

    def __init__(self, values: Mapping[str, Iterable[Any]]) -> None:
        self._words = {key: _words(list(taken)) for key, taken in values.items()}

    def word(self, key: str, value: Any) -> str:
        """The word for ``value`` of the setting ``key``."""
        return self._words[key][identity(value)]

    def name(self, values: Mapping[str, Any], keys: Sequence[str], first: str = "") -> str:
        """``"gcn hidden=16 lr=0.01"``: the settings ``keys`` that ``values`` has; models go without their key."""
        words = [first] if first else []
        for key in (key for key in keys if key in values):
            word = self.word(key, values[key])
            words.append(word if key in ("model", "graph") else f"{key.removeprefix(ARGS)}={word}")
        return " ".join(words)


def _words(values: Sequence[Any]) -> dict[Any, str]:
    distinct = {identity(value): value for value in values}
    if len(distinct) > MAX_LONG_NUMBERS and all(isinstance(value, float) for value in distinct.values()):
        return {key: describe(value) for key, value in distinct.items()}
    for digits in (3, 4, 6, 9, 17):
        words = {key: describe(value, digits) for key, value in distinct.items()}
        if len(set(words.values())) == len(words):
            return words
    return {key: f"{word}#{index}" for index, (key, word) in enumerate(words.items(), 1)}


# ---- How a rank on a GPU sums rows of which some are a peer's.
#
# ``"staged"``: in pieces, remote rows copied in chunks while local ones are summed; ``"tiles"`` of remote rows that
# arrive while the plain SpMM sums what is there; ``"interleaved"``: in pairs of pieces, remote rows read once per edge;
# ``"fetched"``: all remote rows first, then one plain SpMM.

SHARDED_KERNELS = ("staged", "tiles", "interleaved", "fetched")
