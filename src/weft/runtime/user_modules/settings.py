"""Which settings a model reads: from its traits row if it is built in, from its signature if it is a user's.

A setting that was given and that nothing reads would be reported as if it had been tried, so it is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from torch import nn

from weft.core.errors import SpecError
from weft.core.settings.value_names import identity
from weft.core.suggest import nearest_names
from weft.core.task import (
    LOOP_SETTINGS,
    OPTIMIZER_GIVEN,
    OPTIMIZER_SETTINGS,
    SAMPLING_SETTINGS,
    Task,
    model_settings,
    name_of,
)
from weft.nn.build import check_options
from weft.runtime.user_modules.importing import import_callable, import_from

SIZES = ("in_features", "out_features")
DEFAULTS = {f.name: f.default_factory() if f.default is MISSING else f.default for f in fields(Task)}  # type: ignore[misc]


@dataclass(frozen=True)
class Signature:
    """What a callable that builds a model takes besides its two sizes.

    ``names``: parameters; ``required``: those without a default; ``open``: it has ``**kwargs``; ``by_name``: its
    sizes are called ``in_features`` and ``out_features``, wherever they stand; ``shown``: as it is written;
    ``second``: what the parameter is called that gets ``out_features``.
    """

    names: tuple[str, ...]
    required: tuple[str, ...]
    open: bool
    by_name: bool
    shown: str
    second: str = ""

    def takes(self, name: str) -> bool:
        """Whether it can be given ``name``."""
        return self.open or name in self.names


def signature_of(factory: Callable[..., Any]) -> Signature:
    """What ``factory(in_features, out_features, ...)`` takes."""
    called = str(getattr(factory, "__name__", type(factory).__name__))
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # written in C: it is called with the two sizes alone
        return Signature((), (), False, False, f"{called}(...)")
    kinds, found = inspect.Parameter, list(signature.parameters.values())
    bare = [p.replace(annotation=kinds.empty) for p in found]
    shown = signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    named = [p for p in found if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    by_name = set(SIZES) <= {p.name for p in named}
    positional = [p.name for p in found if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    sizes = SIZES if by_name else tuple(positional[:2])
    own = [p for p in named if p.name not in sizes]
    return Signature(
        tuple(p.name for p in own),
        tuple(p.name for p in own if p.default is kinds.empty),
        any(p.kind is kinds.VAR_KEYWORD for p in found),
        by_name,
        f"{called}{shown}",
        sizes[1] if len(sizes) > 1 else "",
    )


def arguments(task: Task, signature: Signature) -> dict[str, Any]:
    """The arguments of a user's callable: settings of the task by name, and ``model_args``.

    A setting that the task leaves at its default is left to the callable's own default, if it has one.
    """
    given = [name for name in task.given_to_model() if signature.takes(name)]
    needed = [name for name in signature.required if name in model_settings() and name not in given]
    return {name: getattr(task, name) for name in (*given, *needed)} | task.model_args


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
        _check_second(task, signatures[key])
        _check_arguments(task, signatures[key])
        if task.has_own("optimizer"):
            _check_optimizer(task)
    for name in (*model_settings(), *OPTIMIZER_SETTINGS, *LOOP_SETTINGS, *sorted(SAMPLING_SETTINGS), "convert"):
        read = [_reads(task, name, signatures[identity(task.model)]) for task in tasks]
        shared = any(read) and len({identity(getattr(task, name)) for task in tasks}) == 1
        for task, is_read in zip(tasks, read, strict=True):
            if not is_read and not shared and getattr(task, name) != DEFAULTS[name]:
                raise SpecError(_unread(task, name, signatures[identity(task.model)], any(read)))
    _check_seeds(tasks)


def _signature(task: Task) -> Signature | None:
    """The signature of a user's callable; None for a named model and for a module that is already built."""
    if task.traits is not None or isinstance(task.model, nn.Module):
        return None
    if not isinstance(task.model, str):
        return signature_of(task.model)
    try:
        return signature_of(import_callable(task))
    except SpecError:  # the task fails when its model is built, and costs the others nothing
        return Signature((), (), True, False, task.model_name)


def takes(make: Callable[..., Any], name: str) -> bool:
    """Whether ``make`` can be given ``name``."""
    try:
        found = inspect.signature(make).parameters
    except (TypeError, ValueError):
        return False
    return name in found or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in found.values())


def _check_optimizer(task: Task) -> None:
    """Settings that are given and that an optimizer of the user's own does not take."""
    make = task.optimizer
    if isinstance(make, str):
        try:
            make = import_from(task.label, "optimizer", make)
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


def _reads(task: Task, name: str, signature: Signature | None) -> bool:
    named = (*OPTIMIZER_SETTINGS, *SAMPLING_SETTINGS, *LOOP_SETTINGS, "convert")
    if name in named or task.traits is not None:
        return not task.ignores(name)
    return signature is not None and signature.takes(name)


def _unread(task: Task, name: str, signature: Signature | None, elsewhere: bool) -> str:
    value = getattr(task, name)
    start = f"task {task.label!r}: {name}={value!r} would have no effect: "
    if name in LOOP_SETTINGS:
        why = task.why_ignored(name) or ""
    elif name in OPTIMIZER_SETTINGS:
        users = OPTIMIZER_SETTINGS[name]
        why = f"{task.optimizer} does not use {name}, {' and '.join(users)} do{'es' * (len(users) == 1)}"
    elif name in SAMPLING_SETTINGS:
        why = f"mode={task.mode!r} trains on the whole graph; leave {name} out, or set mode='sampled'"
    elif name == "convert":
        why = f"{task.model} has no layers of PyG; leave it out"
    elif signature is not None:
        why = f"{signature.shown} has no parameter {name!r}; add it there, or leave {name} out"
    elif task.traits is not None:
        why = f"{task.model} has no {name}; leave it out"
    else:
        why = f"the model is a {task.model_name} that is already built; give its class, or a function that builds it"
    return start + why + ("; give it only to those that read it, with tasks=[{...}, ...]" if elsewhere else "")


def _check_second(task: Task, signature: Signature | None) -> None:
    """A width where the number of classes is given: ``GCN(in_channels, hidden_channels, num_layers, out_channels)``."""
    if signature is not None and "hid" in signature.second.lower():
        raise SpecError(
            f"task {task.label!r}: {signature.shown} would get out_features as {signature.second!r}: a model is called "
            "with (in_features, out_features); give a function of these two that builds it, or call its parameters so"
        )


def _check_arguments(task: Task, signature: Signature | None) -> None:
    """Names of ``model_args`` that the model does not have."""
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
        for name in task.model_args:
            if not signature.takes(name):
                hint = nearest_names(name, signature.names)
                raise SpecError(f"{where}: {signature.shown} has no parameter {name!r}{hint}")


def _check_seeds(tasks: Sequence[Task]) -> None:
    """Several seeds of one module, all of which would begin with the weights that it has."""
    seeds: dict[int, Task] = {}
    for task in tasks:
        if isinstance(task.model, nn.Module) and task.init != "fresh":
            first = seeds.setdefault(id(task.model), task)
            if task.seed != first.seed:
                raise SpecError(
                    f"task {task.label!r}: seed={task.seed} and seed={first.seed} of one {task.model_name} object "
                    'would begin with the same weights; give its class, or init="fresh" to draw new ones for every seed'
                )
