"""Walk what a user's module keeps: places with names, and the values inside of containers, objects and functions.

A place is an attribute of one of its modules, or a parameter, buffer or submodule that the training state does not
hold: a frozen parameter, a buffer that was None at first, whatever a call has registered.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.nn.pyg.swap import DROPOUT
from weft.runtime.user_modules.attributes import CLOCK, LOCKS, OF_ITS_CLASS, REGISTERED

SCRIPT = "script"  # the kind of a place in a module of torch.jit
OF_HOOKS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
NO_PLACE = frozenset((*REGISTERED, *OF_HOOKS))  # the latter are by numbers of hooks
NOT_DATA = (type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, *LOCKS)
OF_CONVERTED = "_weft_"  # what a converted layer of PyG has besides
OF_WEFT = ("weft.ops", "weft.graph", "weft.flow")  # adjacencies and the like, which every call is given again
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
