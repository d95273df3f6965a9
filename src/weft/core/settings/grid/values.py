"""The values of a sweep's settings: which are lists or ranges, how they are frozen, compared and written as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from weft.core.errors import SpecError
from weft.core.settings.callback import Callback
from weft.core.settings.search_space import Choice, Range, from_table
from weft.core.settings.value_names import ARGS, identity
from weft.core.task import (
    OPTIMIZER_GIVEN,
    SAMPLING_SETTINGS,
    Task,
    model_settings,
    plain_value,
)

ARG = "argument"  # of a model, where its name does not matter
TABLES = ("optimizer_args", "param_groups", "plateau")  # settings of which one value is a table
REPEATS = ("split", "seed")  # settings that repeat a training, rather than choose how it is done
ABSENT = object()  # the value of a setting that is not given


def is_grid(name: str, value: Any) -> bool:
    """Whether ``value`` lists several values of the setting ``name``; one value of betas or fanout is a list itself."""
    if name in ("betas", "fanout") and isinstance(value, (list, tuple)):
        return not value or all(isinstance(item, (list, tuple)) for item in value)
    if name == "class_weights" and isinstance(value, (list, tuple)):
        return not value or not all(isinstance(item, (int, float)) for item in value)
    if name == "callbacks":  # however many, they are called for every task
        return False
    return isinstance(value, (list, tuple, range))


def varies(name: str, value: Any) -> bool:
    """Whether ``value`` makes a sweep of a task: a list, or a range to draw from."""
    if name == "model_args" and isinstance(value, Mapping):
        return any(varies(key, item) for key, item in value.items())
    return isinstance(value, (Range, Choice)) or is_grid(name, value)


def read_value(name: str, value: Any) -> Any:
    """A value out of JSON or TOML: tables say how to draw, anything else is itself."""
    if name == "model_args" and isinstance(value, Mapping):
        return {key: read_value(key, item) for key, item in value.items()}
    if name in TABLES or not isinstance(value, Mapping):
        return value
    return from_table(name, value)


def with_args_apart(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with each of ``model_args`` under a key of its own: ``model_args.width``."""
    args = settings.get("model_args", {})
    found = {key: value for key, value in settings.items() if key != "model_args"}
    return found | {f"{ARGS}{name}": value for name, value in args.items()}


def joined_args(values: Mapping[str, Any], whole: bool = False) -> dict[str, Any]:
    """The inverse. ``whole``: a tuple is one value, to be kept as the only one of a list."""
    args = {key.removeprefix(ARGS): value for key, value in values.items() if key.startswith(ARGS)}
    if whole:
        args = {name: (value,) if isinstance(value, (list, tuple, range)) else value for name, value in args.items()}
    found = {key: value for key, value in values.items() if not key.startswith(ARGS)}
    return found | ({"model_args": args} if args else {})


def setting_of(task: Task, key: str, absent: Any = None) -> Any:
    """The value of a setting by the name that :attr:`Sweep.varying` gives it; ``absent`` for a missing argument."""
    return task.model_args.get(key.removeprefix(ARGS), absent) if key.startswith(ARGS) else getattr(task, key)


def gives(task: Task, key: str) -> bool:
    """Whether a task has a value for a setting: a model of the user's own has defaults of its own for the rest."""
    if key.startswith(ARGS):
        return key.removeprefix(ARGS) in task.model_args
    of_torch = key in OPTIMIZER_GIVEN and task.has_own("optimizer")  # which has defaults of its own
    if key in SAMPLING_SETTINGS or of_torch:  # setting the former selects sampled batches
        return key in task.given
    return key in task.given or task.traits is not None or key not in model_settings()


def matters(task: Task, key: str, usual: Task) -> bool:
    """Whether leaving the value of a setting out would change the task."""
    return task.traits is None or key.startswith(ARGS) or getattr(task, key) != getattr(usual, key)


def frozen(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with every list, range and array as a tuple, so that equal sweeps compare equal."""
    args = settings.get("model_args", {})
    if not isinstance(args, Mapping):
        raise SpecError(f"sweep: model_args={args!r} must be a dict, such as model_args={{'width': [16, 32]}}")
    for key, value in settings.items():
        if isinstance(value, (set, frozenset, Iterator)):
            kind = type(value).__name__
            raise SpecError(f"sweep: {key} is a {kind}; give a list, which has an order and can be read again")
    return {key: _as_tuples(value) for key, value in settings.items()}


def seed_last(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Wherever split and seed were written, members that differ in them alone stand together, and names end so."""
    last = {key: settings[key] for key in REPEATS if key in settings}
    return {key: value for key, value in settings.items() if key not in last} | last


def _as_tuples(value: Any) -> Any:
    if hasattr(value, "tolist") and getattr(value, "ndim", None):  # arrays of numpy and torch
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _as_tuples(item) for key, item in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, (list, tuple, range)) else value


def distinct(values: Iterable[Any]) -> int:
    """How many different values there are."""
    return len({identity(value) for value in values})


def as_plain(key: str, value: Any) -> Any:
    """``value`` as JSON has it."""
    if isinstance(value, (Range, Choice)):
        return value.to_dict()
    if isinstance(value, tuple):
        return [as_plain(key, item) for item in value]
    if key == "model_args":
        return {name: as_plain(ARG, item) for name, item in value.items()}
    if (key == ARG and not hasattr(value, "item")) or key in TABLES:
        return plain_value(value)
    if isinstance(value, Callback):
        return value.to_dict()
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if hasattr(value, "__fspath__"):
        return str(value)
    if key in ("graph", "model"):
        task = Task(graph=value) if key == "graph" else Task(graph="any", model=value)
        return task.to_dict()[key]
    return value.item() if hasattr(value, "item") else plain_value(value)
