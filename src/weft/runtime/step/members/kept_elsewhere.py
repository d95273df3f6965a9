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

from weft.runtime.step.members.outside import CODE, DEPTH, MOST, Outside, cache_of, held_by_methods, variables
from weft.runtime.user_modules.attributes import attributes
from weft.runtime.user_modules.input_writes import same_numbers
from weft.runtime.user_modules.kept.walking import cells, fields

PLAIN = (bool, int, float, complex, str, bytes, type(None))
LARGE = 1 << 18  # numbers of a tensor that are not compared


def outside_state(model: nn.Module) -> dict[str, Any]:
    """Names with something that is equal as long as their value is."""
    found = {one.name: one.value for one in variables(model) if cache_of(one.value) is None}
    return {name: _mark(value, DEPTH) for name, value in (*found.items(), *held_by_methods(model))}


class BeforeCalls:
    """What is outside of ``model``, which nothing has called yet."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._outside, self._marks = model, Outside(model), outside_state(model)
        self.put_back, self.for_a_while = self._outside.put_back, self._outside.for_a_while

    def changed(self) -> list[str]:
        """Names of what calls have changed."""
        return differing(self._marks, outside_state(self._model))


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names whose value is no longer what it was."""
    return [name for name, mark in after.items() if name not in before or before[name] != mark]


def closure_state(model: nn.Module) -> dict[str, Any]:
    """The same for what functions among a module's attributes hold: copies of the module have the same functions."""
    found = {name: value for name, value in attributes(model) if isinstance(value, types.FunctionType)}
    return {name: [_mark(one, DEPTH) for one in cells(function).values()] for name, function in found.items()}


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
        return isinstance(other, _Numbers) and same_numbers(self._values, other._values)


def _mark(value: Any, depth: int) -> Any:
    """Something that can be compared later; None for what is not data."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        return _mark_tensor(value)
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


def _mark_tensor(value: Tensor) -> Any:
    if torch._C._functorch.is_functorch_wrapped_tensor(value) or value.is_meta:  # of a stack, or of a dry run
        return id(value)
    small = value.numel() <= LARGE and value.layout is torch.strided
    return id(value), 0 if value.is_inference() else value._version, _Numbers(value.detach().clone()) if small else 0


def _large(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.size > MOST
