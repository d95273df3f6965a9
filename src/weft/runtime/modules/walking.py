"""Walk what a user's module keeps: places with names, and the values inside of containers, objects and functions.

A place is an attribute of one of its modules, or a parameter, buffer or submodule that the training state does not
hold: a frozen parameter, a buffer that was None at first, whatever a call has registered.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from weft.nn.pyg.convert import DROPOUT

# ---- Compare what modules keep in Python: attributes that are neither parameters, buffers nor submodules.
#
# A stack runs one module for all members, so these must be equal; a captured step runs no Python, so these must not
# change from call to call.

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


SCRIPT = "script"  # the kind of a place in a module of torch.jit
OF_HOOKS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
NO_PLACE = frozenset((*REGISTERED, *OF_HOOKS))  # the latter are by numbers of hooks
NOT_DATA = (type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, *LOCKS)
OF_CONVERTED = "_weft_"  # what a converted layer of PyG has besides
OF_WEFT = ("weft.ops", "weft.graph", "weft.batches")  # adjacencies and the like, which every call is given again
MOST = 100_000  # values of one place that are looked at


class Scripted:
    """The attributes of a module of ``torch.jit``, which are not in Python, as a table."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def names(self) -> list[str]:
        """Those that are its own."""
        found = self._module._concrete_type.get_attributes()
        held = (*self._module._parameters.keys(), *self._module._buffers.keys(), "training", "_is_full_backward_hook")
        return [name for name in found if name not in held]

    def __getitem__(self, key: str) -> Any:
        return getattr(self._module, key)

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self._module, key, value)

    def get(self, key: str, default: Any = None) -> Any:
        """The attribute, or ``default``."""
        return getattr(self._module, key, default)


class Place(NamedTuple):
    """Where a module keeps a value: its full name, the table it is in, its key there, and the table's if registered."""

    name: str
    table: Any
    key: str
    kind: str = ""

    @property
    def value(self) -> Any:
        """What is there now."""
        return self.table[self.key]

    @property
    def of_hooks(self) -> bool:
        """Whether it is a table of hooks, by numbers that differ from process to process."""
        return self.key.endswith("_hooks") and isinstance(self.value, dict)


class Places:
    """The places of ``model`` as it is now; ``held``: names of parameters and buffers of the training state."""

    def __init__(self, model: nn.Module, held: Collection[str]) -> None:
        self.modules = {name: one for name, one in model.named_modules() if CLOCK not in one._buffers}
        self._all = {id(one): name for name, one in model.named_modules()}
        self._held, self._named = frozenset(held), frozenset(dict(model.named_modules()))

    def __iter__(self) -> Iterator[Place]:
        """A submodule is a place only if it came later."""
        for prefix, module in self.modules.items():
            start = f"{prefix}." if prefix else ""
            if isinstance(module, torch.jit.ScriptModule):
                yield from (Place(start + key, Scripted(module), key, SCRIPT) for key in Scripted(module).names())
                continue
            for key, value in vars(module).items():
                if key not in NO_PLACE and type(value).__module__ != OF_ITS_CLASS and not key.startswith(OF_CONVERTED):
                    yield Place(start + key, module.__dict__, key)
            for kind, others in (("_parameters", self._held), ("_buffers", self._held), ("_modules", self._named)):
                for key, value in getattr(module, kind).items():
                    if value is not None and start + key not in others and key != DROPOUT:
                        yield Place(start + key, getattr(module, kind), key, kind)

    def name_of(self, module: nn.Module) -> str | None:
        """The name of one of the model's modules of the beginning."""
        return self._all.get(id(module))


def inside(value: Any) -> list[Any]:
    """The values in a container, an object or a function; none in what is no data."""
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(value)
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, types.FunctionType):
        return [*cells(value).values(), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, NOT_DATA):
        return []
    return list(fields(value).values())


def cells(function: types.FunctionType) -> dict[str, Any]:
    """The variables that a function holds, by name; empty ones are left out."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found


def fields(value: Any) -> dict[str, Any]:
    """The attributes of an object, in its ``__dict__`` or its ``__slots__``."""
    found = dict(vars(value)) if hasattr(value, "__dict__") else {}
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def tensors_in(value: Any, known: Collection[int] = ()) -> Iterator[Tensor]:
    """The tensors in a value, each once; modules whose ids are ``known`` are not entered."""
    seen: set[int] = set(known)
    left, looked = [value], 0
    while left and looked < MOST:
        one = left.pop()
        looked += 1
        if isinstance(one, Tensor):
            if id(one) not in seen:
                seen.add(id(one))
                yield one
        elif not isinstance(one, (int, float, str)) and id(one) not in seen and not is_given(one):
            seen.add(id(one))
            left += inside(one)


def is_given(value: Any) -> bool:
    """Whether a value is Weft's own, as an adjacency is: calls are given it."""
    return type(value).__module__.startswith(OF_WEFT)


def kept_tensors(places: Iterable[Place], model: nn.Module) -> list[tuple[str, Tensor, int]]:
    """The tensors in ``places``, each with the name of its place and how often it was written to."""
    known = {id(one) for one in model.modules()}
    own = {id(one) for one in (*model.parameters(), *model.buffers()) if not isinstance(one, nn.Parameter)}
    own |= {id(p) for p in model.parameters() if p.requires_grad}
    found = [(place, one) for place in places for one in tensors_in(place.value, known)]
    named = [(place.name, one) for place, one in found if place.kind or id(one) not in own]
    return [(name, one, 0 if one.is_inference() else one._version) for name, one in named]
