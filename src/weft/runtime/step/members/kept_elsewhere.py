"""What calls of a user's module may change beside its attributes and buffers, and whether they have.

Attributes of its classes and global variables of its code are outside of it. A plain loop has one model and calls it
once per step; Weft also builds and calls copies, and trains several models in turn: all would change the same variable.
Variables of functions that it keeps, and parameters that do not train, are its own, but no attributes of it.
"""

from __future__ import annotations

import random
import types
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.runtime.user_modules.attributes import attributes
from weft.runtime.user_modules.kept.walking import cells, fields

LIBRARIES = ("torch", "torch_geometric", "weft", "numpy", "builtins")  # whose state is not a user's
DEPTH = 3  # functions that functions call, and containers in containers
MOST = 1000  # items of a container that are looked at
PLAIN = (bool, int, float, complex, str, bytes, type(None))
CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, nn.Module)


def outside_state(model: nn.Module) -> dict[str, Any]:
    """Names with something that is equal as long as their value is."""
    kinds = {kind: None for module in model.modules() for kind in type(module).__mro__ if not _of_library(kind)}
    found: dict[str, Any] = {}
    for kind in kinds:
        for key, value in vars(kind).items():
            function = _function(value)
            if function is not None:
                found.update(_globals(function, DEPTH))
                found.update(_held_by(function))
            elif not key.startswith("__"):
                found[f"{kind.__name__}.{key}"] = _mark(value, DEPTH)
    return found


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names whose value is no longer what it was."""
    return [name for name, mark in after.items() if name not in before or before[name] != mark]


def closure_state(model: nn.Module) -> dict[str, Any]:
    """The same for what functions among a module's attributes hold: copies of the module have the same functions."""
    found = {name: value for name, value in attributes(model) if isinstance(value, types.FunctionType)}
    return {name: [_mark(one, DEPTH) for one in cells(function).values()] for name, function in found.items()}


def _of_library(thing: Any) -> bool:
    return (getattr(thing, "__module__", None) or "builtins").split(".")[0] in LIBRARIES


def _function(value: Any) -> types.FunctionType | None:
    """The function that a class has as a method, a static one, or a property."""
    inside = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return inside if isinstance(inside, types.FunctionType) else None


def _globals(function: types.FunctionType, depth: int) -> Iterator[tuple[str, Any]]:
    """Global variables that ``function`` names, and those of functions that it names."""
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, types.FunctionType) and depth and not _of_library(value):
            yield from _globals(value, depth - 1)
        elif value is not None:
            yield name, _mark(value, DEPTH)


def _held_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Variables that a method holds, and its defaults: all modules of its class share them."""
    for name, value in (*cells(function).items(), *_defaults(function)):
        if not isinstance(value, CODE):
            yield name, _mark(value, DEPTH)


def _defaults(function: types.FunctionType) -> list[tuple[str, Any]]:
    """The parameters of a function that have defaults, with these."""
    defaults = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    by_place = zip(names[len(names) - len(defaults) :], defaults, strict=True)
    return [*by_place, *(function.__kwdefaults__ or {}).items()]


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def frozen_state(model: nn.Module) -> dict[str, Any]:
    """The same for parameters that do not train, with their numbers: who writes to ``.data`` leaves no trace."""
    norms = {id(one.weight) for one in model.modules() if getattr(one, "max_norm", None) is not None}  # they stay so
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad and id(p) not in norms}
    return {name: (p._version, _Numbers(p.detach().clone())) for name, p in frozen.items()}


@contextmanager
def shifted_frozen(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Give parameters that do not train other numbers for a while; gives their state.

    A teacher that begins as a copy of what it follows does not move in a first step.
    """
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    before = [p.detach().clone() for p in frozen]
    for p in frozen:
        p.data = p.data * 1.5 + 0.01
    try:
        yield frozen_state(model)
    finally:
        for p, value in zip(frozen, before, strict=True):
            p.data = value


class _Numbers:
    """Equal to others with the same bits."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Numbers) and torch.equal(self._values, other._values)


def _mark(value: Any, depth: int) -> Any:
    """Something that can be compared later; None for what is not data."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return str(value.get_state()[1:3])
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, CODE) or not depth:
        return None
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return len(value), [_mark(one, depth - 1) for one in list(value)[:MOST]]
    own = value if isinstance(value, Mapping) else fields(value)
    if not own and not hasattr(value, "__dict__"):
        return repr(value) if type(value).__repr__ is not object.__repr__ and not _large(value) else None
    return len(own), [_mark(one, depth - 1) for one in list(own.values())[:MOST]]


def _large(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.size > MOST
