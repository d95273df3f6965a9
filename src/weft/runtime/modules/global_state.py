"""GlobalsSnapshot: what the code of a user's module keeps outside of it, and how to restore that.

All copies of a module share the attributes of its classes, the global variables that its methods name, what these
methods hold in closures and defaults, and the caches of ``functools``. A dry run and a preflight call copies: the
training that follows must find all of it as it was.
"""

from __future__ import annotations

import functools
import random
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.runtime.modules.state import has_values, same_numbers

LIBRARIES = ("torch", "torch_geometric", "weft", "numpy", "builtins")  # whose state is not a user's
DEPTH = 3  # functions that functions call, and containers in containers
MOST = 1000  # items of a container that are looked into
COPIED = 1 << 18  # numbers of a tensor: writes to larger ones through .data are not noticed
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
CACHED = type(functools.lru_cache(lambda: None))
WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
CONTAINERS = (list, deque, set, dict, OrderedDict, defaultdict, Counter, *WEAK)


class GlobalsSnapshot:
    """Variables outside of ``model`` now: which values they have, and what is in containers and objects of the user's.

    Objects of libraries, as a graph that builds a form of itself when it is first read, are not looked into.
    """

    def __init__(self, model: nn.Module) -> None:
        kinds = {kind: None for module in model.modules() for kind in type(module).__mro__ if not is_library(kind)}
        self._classes = list(kinds)
        self._files = {kind.__module__ for kind in self._classes}
        self._variables = self._found()
        self._contents: dict[int, tuple[str, Any, Any]] = {}
        self._tensors: dict[int, tuple[str, Tensor, int, Tensor | None]] = {}
        self._generators: dict[int, tuple[str, Any, Any]] = {}
        for (_, key), (table, value) in self._variables.items():
            name = f"{table.__name__}.{key}" if isinstance(table, type) else key
            self._note(name, value, DEPTH)

    def changed(self) -> list[str]:
        """Names of variables with another value or content than in the snapshot; caches do not count."""
        now, names = self._found(), []
        for key, (table, value) in now.items():
            if _cache_in(value) is None and (key not in self._variables or self._variables[key][1] is not value):
                old = self._variables.get(key, (None, None))[1]
                same = type(old) is type(value) and isinstance(value, (int, float, str)) and old == value
                name = f"{table.__name__}.{key[1]}" if isinstance(table, type) else key[1]
                names += [] if same else [name]
        names += [name for name, thing, content in self._contents.values() if not _is_same(_content(thing), content)]
        for name, tensor, version, copy in self._tensors.values():
            if tensor._version != version or (copy is not None and not same_numbers(tensor.detach(), copy)):
                names.append(name)
        names += [name for name, generator, state in self._generators.values() if str(_drawn(generator)) != str(state)]
        return list(dict.fromkeys(names))

    def restore(self) -> None:
        """Give variables and containers what they had; variables that have come since are removed."""
        for key, (table, value) in self._found().items():
            if _cache_in(value) is not None:
                continue  # see fresh_caches
            if key not in self._variables:
                delattr(table, key[1]) if isinstance(table, type) else table.pop(key[1])
            elif self._variables[key][1] is not value:
                _assign(table, key[1], self._variables[key][1])
        for _, thing, content in self._contents.values():
            if not _is_same(_content(thing), content):
                content_table = thing if isinstance(thing, CONTAINERS) else thing.__dict__
                content_table.clear()
                (content_table.extend if isinstance(content_table, (list, deque)) else content_table.update)(content)
        for _, tensor, _, copy in self._tensors.values():
            if copy is not None and not same_numbers(tensor.detach(), copy):
                tensor.data.copy_(copy)
        for _, generator, state in self._generators.values():
            if isinstance(generator, np.random.Generator):
                generator.bit_generator.state = state
            else:
                getattr(generator, "setstate" if isinstance(generator, random.Random) else "set_state")(state)

    @contextmanager
    def fresh_caches(self) -> Iterator[None]:
        """Inside, functions with a cache of ``functools`` have an empty one; afterwards each has its own again."""
        cached = [(table, key, value) for (_, key), (table, value) in self._found().items() if _cache_in(value)]
        for table, key, value in cached:
            cached_function = _cache_in(value)
            function = functools.lru_cache(**cached_function.cache_parameters())(cached_function.__wrapped__)
            if isinstance(value, property):
                function = property(function, value.fset, value.fdel)
            elif isinstance(value, (staticmethod, classmethod)):
                function = type(value)(function)
            _assign(table, key, function)
        try:
            yield
        finally:
            for table, key, value in cached:
                _assign(table, key, value)

    def _found(self) -> dict[tuple[int, str], tuple[Any, Any]]:
        """Table and value of every variable that the classes have or their code names, by table and name."""
        variables: dict[tuple[int, str], tuple[Any, Any]] = {}
        for kind in self._classes:
            for key, value in list(vars(kind).items()):
                function = _function_in(value)
                if function is not None:
                    variables |= _globals_of(function, DEPTH)
                    variables |= {(id(function), name): ({}, held) for name, held in _held_by(function)}
                if (function is None or _cache_in(value) is not None) and not key.startswith("__"):
                    variables[id(kind), key] = kind, value
        return variables

    def _note(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, Tensor) and has_values(value) and not value.is_inference():
            copy = value.detach().clone() if value.numel() <= COPIED else None
            self._tensors[id(value)] = name, value, value._version, copy
        if isinstance(value, GENERATORS):
            self._generators[id(value)] = name, value, _drawn(value)
        is_users = type(value) in CONTAINERS or (hasattr(value, "__dict__") and type(value).__module__ in self._files)
        if not is_users or not depth or id(value) in self._contents or isinstance(value, (type, nn.Module)):
            return
        content = _content(value)
        self._contents[id(value)] = name, value, content
        for item in list(content.values() if isinstance(content, dict) else content)[:MOST]:
            self._note(name, item, depth - 1)


def is_library(thing: Any) -> bool:
    """Whether a class or function comes from a library, whose state is not a user's."""
    return (getattr(thing, "__module__", None) or "builtins").split(".")[0] in LIBRARIES


def _function_in(value: Any) -> types.FunctionType | None:
    """The function behind a method, a static one, a property, or one with a cache."""
    inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    inner = inner.__wrapped__ if isinstance(inner, CACHED) else inner
    return inner if isinstance(inner, types.FunctionType) else None


def _cache_in(value: Any) -> Any:
    """The function with a cache of ``functools`` that a value is, as a method or by itself; None if it is none."""
    inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return inner if isinstance(inner, CACHED) else None


def _globals_of(function: types.FunctionType, depth: int) -> dict[tuple[int, str], tuple[Any, Any]]:
    """Global variables that ``function`` names, and those of functions that it names."""
    codes, names = [function.__code__], []
    while codes:
        code = codes.pop()
        names += code.co_names
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    variables: dict[tuple[int, str], tuple[Any, Any]] = {}
    for name in dict.fromkeys(names):
        value = function.__globals__.get(name, function)
        called = _function_in(value)
        if value is function or isinstance(value, types.ModuleType):
            continue
        if called is not None and depth and not is_library(called):
            variables |= _globals_of(called, depth - 1)
        if called is None or _cache_in(value) is not None:
            variables[id(function.__globals__), name] = function.__globals__, value
    return variables


def _held_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables that a function holds, and its defaults, by name."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue
    defaults, names = function.__defaults__ or (), function.__code__.co_varnames[: function.__code__.co_argcount]
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _drawn(generator: Any) -> Any:
    """The state of a random generator."""
    if isinstance(generator, np.random.Generator):
        return deepcopy(generator.bit_generator.state)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _content(thing: Any) -> Any:
    """A copy of what is directly in a container or an object."""
    if isinstance(thing, (list, deque, set)):
        return list(thing)
    return dict(thing if isinstance(thing, CONTAINERS) else vars(thing))


def _is_same(mine: Any, other: Any) -> bool:
    if isinstance(mine, dict):
        return mine.keys() == other.keys() and all(mine[key] is other[key] for key in mine)
    return len(mine) == len(other) and all(first is second for first, second in zip(mine, other, strict=True))


def _assign(table: Any, key: str, value: Any) -> None:
    if isinstance(table, type):
        setattr(table, key, value)
    else:
        table[key] = value
