"""Variables outside of a user's module that its code reads: where they are, and giving them back what they held.

They are attributes of its classes, global variables of its code, and what its methods hold. A function that
``functools.lru_cache`` wraps is one that keeps its results in such a place.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from weft.runtime.user_modules.kept.walking import cells, inside

LIBRARIES = ("torch", "torch_geometric", "weft", "numpy", "builtins")  # whose state is not a user's
DEPTH = 3  # functions that functions call, and containers in containers
MOST = 1000  # items of a container that are looked at
CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, nn.Module)
CACHED = type(functools.lru_cache(lambda: None))
SEQUENCES = (list, deque)
WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
CONTAINERS = (list, deque, set, dict, OrderedDict, defaultdict, Counter, *WEAK)


class Variable(NamedTuple):
    """A variable: its name in words, the class, globals or attributes that it is in, and its key there."""

    name: str
    table: Any
    key: str
    value: Any

    def put(self, value: Any) -> None:
        """Assign to it."""
        if isinstance(self.table, type):
            setattr(self.table, self.key, value)
        else:
            self.table[self.key] = value

    def remove(self) -> None:
        """Let there be no such variable."""
        if isinstance(self.table, type):
            delattr(self.table, self.key)
        else:
            del self.table[self.key]


def variables(model: nn.Module) -> list[Variable]:
    """Attributes of the classes of ``model`` and global variables that their methods name; each once."""
    found: dict[tuple[int, str], Variable] = {}
    for kind in own_classes(model):
        for key, value in list(vars(kind).items()):
            function = function_of(value)
            if function is not None:
                found |= {(id(one.table), one.key): one for one in _globals(function, DEPTH)}
            if (function is None or cache_of(value) is not None) and not key.startswith("__"):
                found[id(kind), key] = Variable(f"{kind.__name__}.{key}", kind, key, value)
    return list(found.values())


def held_by_methods(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Variables that methods hold, and their defaults, by name: all modules of a class share them."""
    for kind in own_classes(model):
        for function in filter(None, map(function_of, list(vars(kind).values()))):
            for name, value in (*cells(function).items(), *_defaults(function)):
                if not isinstance(value, CODE):
                    yield name, value


def own_classes(model: nn.Module) -> list[type]:
    """The classes of its modules that are no library's."""
    return list({kind: None for module in model.modules() for kind in type(module).__mro__ if not of_library(kind)})


def of_library(thing: Any) -> bool:
    """Whether it comes from a library whose state is not a user's."""
    return (getattr(thing, "__module__", None) or "builtins").split(".")[0] in LIBRARIES


def function_of(value: Any) -> types.FunctionType | None:
    """The function that a class has as a method, a static one, a property, or one with a cache."""
    inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    inner = inner.__wrapped__ if isinstance(inner, CACHED) else inner
    return inner if isinstance(inner, types.FunctionType) else None


def cache_of(value: Any) -> Any:
    """The function with a cache of ``functools`` that a value is, as a method or by itself; None if it is none."""
    inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return inner if isinstance(inner, CACHED) else None


def _globals(function: types.FunctionType, depth: int) -> Iterator[Variable]:
    """Global variables that ``function`` names, and those of functions that it names."""
    for name in dict.fromkeys(_names(function.__code__)):
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        called = function_of(value)
        if called is not None and depth and not of_library(called):
            yield from _globals(called, depth - 1)
        if called is None or cache_of(value) is not None:
            yield Variable(name, function.__globals__, name, value)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _defaults(function: types.FunctionType) -> list[tuple[str, Any]]:
    """The parameters of a function that have defaults, with these."""
    defaults = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    by_place = zip(names[len(names) - len(defaults) :], defaults, strict=True)
    return [*by_place, *(function.__kwdefaults__ or {}).items()]


# ---- as they were -------------------------------------------------------------------------------------------------


class Outside:
    """What the variables outside of ``model`` hold now, and what is in their containers and objects."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._variables = {(id(one.table), one.key): one for one in variables(model)}
        self._files = {kind.__module__ for kind in own_classes(model)}
        held = [*(one.value for one in self._variables.values()), *(one for _, one in held_by_methods(model))]
        self._contents: dict[int, tuple[Any, Any]] = {}
        for value in held:
            self._note(value, DEPTH)

    def put_back(self) -> None:
        """Let variables and containers hold what they held; what has come since is removed."""
        for one in variables(self._model):
            before = self._variables.get((id(one.table), one.key))
            if before is None:
                one.remove()
            elif before.value is not one.value:
                one.put(before.value)
        for thing, content in self._contents.values():
            if not _same_content(_content(thing), content):
                _fill(thing, content)

    @contextmanager
    def for_a_while(self) -> Iterator[None]:
        """Inside, variables hold what they held, and afterwards what they hold now."""
        now = Outside(self._model)
        self.put_back()
        try:
            yield
        finally:
            now.put_back()

    def _note(self, value: Any, depth: int) -> None:
        own = type(value) in CONTAINERS or (hasattr(value, "__dict__") and type(value).__module__ in self._files)
        if not own or isinstance(value, CODE) or not depth or id(value) in self._contents:
            return
        self._contents[id(value)] = (value, _content(value))
        for one in inside(value)[:MOST]:
            self._note(one, depth - 1)


def _content(thing: Any) -> Any:
    """A copy of what is directly in a container or an object."""
    if isinstance(thing, (*SEQUENCES, set)):
        return list(thing)
    return dict(thing if isinstance(thing, Mapping) else vars(thing))


def _same_content(mine: Any, other: Any) -> bool:
    if isinstance(mine, dict):
        return mine.keys() == other.keys() and all(mine[key] is other[key] for key in mine)
    return len(mine) == len(other) and all(map(_is, mine, other))


def _is(mine: Any, other: Any) -> bool:
    return mine is other


def _fill(thing: Any, content: Any) -> None:
    own = thing if isinstance(thing, CONTAINERS) else vars(thing)
    own.clear()
    (own.extend if isinstance(own, SEQUENCES) else own.update)(content)


# ---- without caches -----------------------------------------------------------------------------------------------


def caches(model: nn.Module) -> list[Variable]:
    """Functions with a cache of ``functools`` that the code of ``model`` names, and those among its attributes."""
    own = (Variable(key, vars(part), key, value) for part in model.modules() for key, value in vars(part).items())
    return [one for one in (*variables(model), *own) if cache_of(one.value) is not None]


@contextmanager
def uncached(model: nn.Module) -> Iterator[None]:
    """Inside, these functions compute what they return, and their caches stay as they are."""
    found = caches(model)
    for one in found:
        one.put(_without_cache(one.value))
    try:
        yield
    finally:
        for one in found:
            one.put(one.value)


def _without_cache(value: Any) -> Any:
    function = cache_of(value).__wrapped__
    if isinstance(value, property):
        return property(function, value.fset, value.fdel)
    return type(value)(function) if isinstance(value, (staticmethod, classmethod)) else function
