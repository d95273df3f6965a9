"""Compare what modules keep in Python: attributes that are neither parameters, buffers nor submodules.

A stack runs one module for all members, so these must be equal; a captured step runs no Python, so these must not
change from call to call.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CLOCK = "clock"  # the buffer of modules that count their draws
# Parameters, buffers and submodules are compared elsewhere; hooks of a state dict have no part in a call.
REGISTERED = (
    *("_parameters", "_buffers", "_modules", "training", "_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
OF_ITS_CLASS = "torch_geometric.inspector"  # PyG's notes on the methods of a class, filled in by its first module
Kept = list[tuple[str, Tensor, int]]
LOCKS = (type(threading.Lock()), type(threading.RLock()))  # hold nothing between calls
PLAIN = (bool, int, float, complex, str, bytes, type, range, slice, torch.dtype, torch.device)


def attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Full name and value of every attribute; modules with a clock are left out: theirs are per member.

    So are those of ``torch.jit``, whose attributes are not in Python.
    """
    for prefix, module in model.named_modules():
        if CLOCK not in module._buffers and not isinstance(module, torch.jit.ScriptModule):
            for key, value in vars(module).items():
                if key not in REGISTERED and type(value).__module__ != OF_ITS_CLASS:
                    yield f"{prefix}.{key}" if prefix else key, value


def unequal(first: nn.Module, other: nn.Module) -> str | None:
    """The name of an attribute in which two modules of one class differ, or None."""
    return _first_difference(first, other, _Comparison(first, other, with_tensors=True))


def changed(before: nn.Module, after: nn.Module) -> list[str]:
    """Attributes of ``after`` that its calls have changed, ``before`` being a copy that was not called.

    Kept activations and cached tensors do not count: whether a call depends on them shows in its results.
    """
    compare = _Comparison(before, after, with_tensors=False)
    old, new = dict(attributes(before)), dict(attributes(after))
    return [name for name in new if not compare.same(old.get(name), new[name])]


def keeping_others(before: Kept, after: Kept) -> list[str]:
    """Names of attributes with other tensors than before, or with other values in the same ones."""
    old = {(name, id(tensor), version) for name, tensor, version in before}
    return list(dict.fromkeys(name for name, tensor, version in after if (name, id(tensor), version) not in old))


def _first_difference(first: nn.Module, other: nn.Module, compare: _Comparison) -> str | None:
    mine, its = dict(attributes(first)), dict(attributes(other))
    if mine.keys() != its.keys():
        return sorted(mine.keys() ^ its.keys())[0]
    return next((name for name in mine if not compare.same(mine[name], its[name])), None)


class _Comparison:
    """Equality of attributes of two modules; registered submodules are equal if they have the same name."""

    def __init__(self, first: nn.Module, other: nn.Module, with_tensors: bool) -> None:
        self._with_tensors = with_tensors
        self._names = {id(module): name for root in (first, other) for name, module in root.named_modules()}
        self._seen: set[tuple[int, int]] = set()

    def same(self, mine: Any, other: Any) -> bool:
        """Whether two values are equal, inside of containers and objects as well."""
        if mine is other or (id(mine), id(other)) in self._seen:
            return True
        if isinstance(mine, Tensor) or isinstance(other, Tensor):
            return not self._with_tensors or _same_tensor(mine, other)
        if type(mine) is not type(other):
            return not self._with_tensors and _kept(mine, other)
        self._seen.add((id(mine), id(other)))
        if id(mine) in self._names and id(other) in self._names:
            return self._names[id(mine)] == self._names[id(other)]
        return self._same_kind(mine, other)

    def _same_kind(self, mine: Any, other: Any) -> bool:
        if isinstance(mine, LOCKS):
            return True
        if isinstance(mine, PLAIN):
            return bool(mine == other) or (mine != mine and other != other)
        if isinstance(mine, np.ndarray):
            return mine.shape == other.shape and mine.dtype == other.dtype and mine.tobytes() == other.tobytes()
        if isinstance(mine, (list, tuple)):
            return len(mine) == len(other) and all(map(self.same, mine, other))
        if isinstance(mine, Mapping):
            return list(mine) == list(other) and all(self.same(mine[key], other[key]) for key in mine)
        if isinstance(mine, weakref.ref):  # an nn.GRU or nn.LSTM keeps some to its parameters
            return self.same(mine(), other())
        if isinstance(mine, torch.Generator):
            return bool(torch.equal(mine.get_state(), other.get_state()))
        parts = _parts(mine), _parts(other)
        if parts[0] is not None:
            return self.same(*parts)
        return _says_equal(mine, other)


def _parts(value: Any) -> Any:
    """What a function or an object consists of; None if that is not known."""
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [value.__code__, value.__defaults__, value.__kwdefaults__, cells]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, (types.CodeType, types.BuiltinFunctionType, types.ModuleType, set, frozenset)):
        return None
    own = dict(vars(value)) if hasattr(value, "__dict__") else {}
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
    own |= {name: getattr(value, name) for name in slots if not name.startswith("__")}
    return own if own or hasattr(value, "__dict__") else None


def _says_equal(mine: Any, other: Any) -> bool:
    try:
        return bool(mine == other)
    except Exception:
        return False


def _same_tensor(mine: Any, other: Any) -> bool:
    if not isinstance(mine, Tensor) or not isinstance(other, Tensor):
        return False
    if mine.is_meta or mine.layout is not torch.strided or mine.device != other.device:
        return mine.shape == other.shape
    return mine.shape == other.shape and mine.dtype == other.dtype and torch.equal(mine, other)


def _kept(before: Any, after: Any) -> bool:
    """Whether nothing became tensors: an activation or a cache, kept by the first call."""
    if before is not None:
        return False
    values = list(after.values()) if isinstance(after, Mapping) else after
    if isinstance(values, (list, tuple)):
        return bool(values) and all(one is None or isinstance(one, Tensor) or _kept(None, one) for one in values)
    return hasattr(after, "__dict__") and any(isinstance(value, Tensor) for value in vars(after).values())
