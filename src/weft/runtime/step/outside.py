"""Variables outside of a user's module that its code reads: where they are, and giving them back what they held.

They are attributes of its classes, global variables of its code, and what its methods hold. A function that
``functools.lru_cache`` wraps is one that keeps its results in such a place.
"""

from __future__ import annotations

import functools
import random
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from weft.batches.source import Batch
from weft.core.errors import SpecError
from weft.runtime.modules.state import KeptReads
from weft.runtime.modules.walking import Kept, Places, attributes, cells, fields, inside, keeping_others, kept_tensors
from weft.runtime.modules.writes import InputWrites, WeightWrites, same_numbers
from weft.runtime.step.forward import Forward
from weft.runtime.step.inputs import given_tensors

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


# ---- What calls of a user's module may change beside its attributes and buffers, and whether they have.
#
# Attributes of its classes and global variables of its code are outside of it. A plain loop has one model and calls it
# once per step; Weft also builds and calls copies, and trains several models in turn: all would change the same
# variable.
# Variables of functions that it keeps, and parameters that do not train, are its own, but no attributes of it.

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


# ---- Watch the calls of a trial: what a user's module reads of earlier calls, writes, and leaves behind.


class Watch:
    """Watches calls of ``forward``; ``held``: names of the parameters and buffers that the training state holds.

    ``outside``: what was outside of the module before any call.
    """

    def __init__(self, forward: Forward, batch: Batch, held: Collection[str], outside: BeforeCalls) -> None:
        self._forward, self.model = forward, forward.model
        self._places = Places(self.model, held)
        self._given = given_tensors(self.model, batch)
        self.writes, self._inputs = WeightWrites(self.model), InputWrites(self._given)
        self._names = frozenset((*dict(self.model.named_modules()), *dict(self.model.named_parameters())))
        self.outside, self._closures = outside, closure_state(self.model)
        self._frozen = frozen_state(self.model)
        self._first = self._last = self.kept()
        self._rewritten: dict[str, None] = {}
        self.read: dict[str, None] = {}
        self.branches = False
        self.changed_buffers: set[str] = set()
        self.changed_in_evaluation: set[str] = set()

    def kept(self) -> Kept:
        """The tensors that the module keeps now."""
        return kept_tensors(self._places, self.model)

    @contextmanager
    def call(self, training: bool) -> Iterator[None]:
        """Around one call, with its backward pass."""
        before = self.kept()
        reads = KeptReads(before, self._ours())
        self.writes.reads_gradient = False  # a hook in the backward pass may
        self._forward.around = _All(self.writes, self._inputs, reads)
        try:
            yield
        finally:
            self._forward.around = nullcontext()
        self._check_inputs()
        if not training:
            self._check_gradients()
        self._learn(reads, before, training)

    def _learn(self, reads: KeptReads, before: Kept, training: bool) -> None:
        now, first = self.kept(), self._last is self._first
        changed = [*keeping_others(before, now), *sorted(reads.written)]
        if first and training:  # what was not there before may be a cache
            there = {name for name, _, _ in before}
            changed = [name for name in changed if name in there]
        self._rewritten |= dict.fromkeys(changed)
        self.read |= dict.fromkeys(sorted(reads.names))
        self.branches = self.branches or reads.branches
        self._last = now

    def keeps_others_than(self, before: Kept) -> bool:
        """Whether the module keeps other tensors now, or other values in the same ones."""
        return bool(keeping_others(before, self.kept()))

    def _ours(self) -> list[Tensor]:
        held = [p for p in self.model.parameters() if p.requires_grad]
        named = {place.name for place in self._places}
        held += [one for name, one in self.model.named_buffers() if name not in named]
        return [*held, *self._given.values()]

    # ---- what was seen -----------------------------------------------------------------------------------

    @property
    def rewritten(self) -> list[str]:
        """Places with tensors that calls make anew or write to, again and again."""
        constrained = {id(one.weight) for one in self.model.modules() if getattr(one, "max_norm", None) is not None}
        stay = {name for name, one, _ in self._last if id(one) in constrained}
        return [name for name in self._rewritten if name not in stay]

    @property
    def made(self) -> list[str]:
        """Places with tensors that the first calls made, and that none has changed since."""
        return [name for name in keeping_others(self._first, self._last) if name not in self._rewritten]

    def registered(self) -> list[str]:
        """Submodules and parameters that calls have made."""
        return [
            name
            for name in (*dict(self.model.named_modules()), *dict(self.model.named_parameters()))
            if name not in self._names
        ]

    def frozen_changed(self) -> list[str]:
        """Parameters that do not train, and that calls have changed."""
        return differing(self._frozen, frozen_state(self.model))

    def functions_changed(self) -> list[str]:
        """Functions that the module keeps, and whose variables calls have changed."""
        return differing(self._closures, closure_state(self.model))

    def check_shared(self, changed: Sequence[str]) -> None:
        """A :class:`SpecError` if calls have ``changed`` what all copies of the module share."""
        if changed:
            raise SpecError(
                f"model {_name(self.model)} changes {changed[0]} when it is called, and gives other numbers when it is "
                "called again; that is shared by all copies of it, so their calls would change it too: keep it in self"
            )

    def _check_inputs(self) -> None:
        changed = self._inputs.changed()
        if changed:
            name = changed[0]
            raise SpecError(
                f"model {_name(self.model)} changes {name} in place, which every call is given again; let it change a "
                f"copy: {name} = {name}.clone()"
            )

    def _check_gradients(self) -> None:
        if self.writes.reads_gradient:
            raise SpecError(
                f"model {_name(self.model)} reads the .grad of its weights in evaluation, where Weft has none: keep "
                "what it needs of them in a buffer, by a hook on the weight"
            )


def _name(model: nn.Module) -> str:
    return type(model).__name__


class _All(AbstractContextManager[None]):
    """Several that watch, each inside of the one before; may be entered again."""

    def __init__(self, *watches: AbstractContextManager[Any]) -> None:
        self._watches = watches
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        self._entered.append(ExitStack())
        for watch in self._watches:
            self._entered[-1].enter_context(watch)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)
