"""Pack what a module keeps: JSON for numbers, texts, containers and objects, and tensors as they are.

Numbers, texts and None are themselves, everything else is a dict that says what it ``is``. Nothing is pickled: objects
are their attributes, put into the one that the constructor made, or into a new one of a class of the user's own code.
"""

from __future__ import annotations

import enum
import functools
import random
import re
import types
import weakref
from collections import deque
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.runtime.user_modules.kept.walking import NOT_DATA, OF_HOOKS, cells, fields

SCALARS = (type(None), bool, int, float, str)
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
}
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
REPLACED = ("tensor", "sparse", "array", "items", "pairs", "object", "generator")
Tree = Any
Reference = Callable[[Any], "dict[str, Any] | None"]


@dataclass(frozen=True)
class Packed:
    """A value as JSON, and the tensors that it names by their places; ``whole``: it can be given back.

    ``sources``: of each tensor, what to recognise it by when it is packed again.
    """

    tree: Tree
    tensors: tuple[Tensor, ...] = ()
    whole: bool = True
    sources: tuple[Any, ...] = field(default=(), compare=False, repr=False)

    def same(self, other: Packed | None) -> bool:
        """Whether all values are equal."""
        if other is None or self.tree != other.tree or len(self.tensors) != len(other.tensors):
            return False
        return all(mine is its or _equal(mine, its) for mine, its in zip(self.tensors, other.tensors, strict=True))


def pack(value: Any, refer: Reference, made: Container[int], former: Packed | None = None) -> Packed:
    """``value`` now; ``refer`` names what is not to be copied; unchanged tensors are those of ``former``.

    ``made``: ids of what the constructor made, which is filled again when it is given back, and not replaced.
    """
    packer = _Packer(refer, made, former)
    tree = packer(value)
    return Packed(tree, tuple(packer.tensors), packer.whole, tuple(packer.sources))


class _Packer:
    def __init__(self, refer: Reference, made: Container[int], former: Packed | None) -> None:
        self._refer, self._made = refer, made
        self._former = () if former is None else tuple(zip(former.tensors, former.sources, strict=False))
        self._trees: dict[int, dict[str, Any]] = {}
        self._alive: list[Any] = []  # ids are unique among what lives
        self.tensors: list[Tensor] = []
        self.sources: list[Any] = []
        self.whole = True

    def __call__(self, value: Any) -> Tree:
        if type(value) in SCALARS:
            return value
        found = self._refer(value)
        if found is not None:
            return found
        if id(value) in self._trees:
            return self._again(self._trees[id(value)])
        self._trees[id(value)] = tree = {}
        self._alive.append(value)
        tree |= self._kind(value)
        if id(value) not in self._made and tree["is"] in REPLACED:
            tree["new"] = True
        return tree

    def _again(self, tree: dict[str, Any]) -> Tree:
        """A reference to what is packed already, or is being packed."""
        tree.setdefault("number", len(self._alive))
        return {"is": "again", "number": tree["number"]}

    def _kind(self, value: Any) -> Tree:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, (np.ndarray, np.generic)):
            return self._array(value)
        if isinstance(value, GENERATORS):
            return self._generator(value)
        text = _text(value)
        if text is not None:
            return text
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            more = {"maxlen": value.maxlen} if isinstance(value, deque) else {}
            return {"is": "items", "class": _class(value), "items": [self(one) for one in value], **more}
        if isinstance(value, Mapping) and hasattr(value, "items"):
            pairs = [[self(key), self(one)] for key, one in value.items()]
            return {"is": "pairs", "class": _class(value), "pairs": pairs}
        return self._object(value)

    def _object(self, value: Any) -> Tree:
        if isinstance(value, types.FunctionType):
            return {"is": "function", "cells": {name: self(one) for name, one in cells(value).items()}}
        if isinstance(value, types.MethodType):
            return {"is": "constant", "of": value.__func__.__qualname__, "parts": [self(value.__self__)]}
        if isinstance(value, functools.partial):
            return {"is": "constant", "of": "partial", "parts": [self(one) for one in (value.func, *value.args)]}
        if isinstance(value, NOT_DATA):
            return {"is": "constant", "of": getattr(value, "__qualname__", str(type(value)))}
        if isinstance(value, weakref.ref):
            return {"is": "constant", "of": "weakref", "parts": [self(value())]}
        own = fields(value)
        if not own and not hasattr(value, "__dict__"):
            self.whole = False
            return {"is": "other", "class": _class(value), "shown": _shown(value)}
        if isinstance(value, nn.Module):  # hooks are by numbers that differ from process to process
            named = {key: one for key, one in own.items() if key not in OF_HOOKS}
            own = {key: list(one.values()) if key.endswith("_hooks") else one for key, one in named.items()}
        return {"is": "object", "class": _class(value), "fields": {key: self(one) for key, one in own.items()}}

    def _tensor(self, value: Tensor) -> Tree:
        if torch._C._functorch.is_functorch_wrapped_tensor(value):  # of a call of several members: it has no values
            return {"is": "other", "class": "Tensor of a stack"}
        parameter = isinstance(value, nn.Parameter)
        about = {"parameter": parameter, "grad": parameter and value.requires_grad, "host": value.device.type == "cpu"}
        if value.layout is torch.strided:
            return {"is": "tensor", "at": self._add(value), **about}
        if value.layout is torch.sparse_coo:
            parts = [value._indices(), value._values()]
            about["coalesced"] = value.is_coalesced()
        elif value.layout in COMPRESSED:
            parts = [getattr(value, name)() for name in COMPRESSED[value.layout]]
        else:
            self.whole = False
            return {"is": "other", "class": str(value.layout)}
        sparse = {"layout": str(value.layout), "size": list(value.shape), "parts": [self._add(one) for one in parts]}
        return {"is": "sparse", **sparse, **about}

    def _add(self, value: Tensor) -> int:
        """The place of a tensor's values: a copy, unless it is the one that was packed before."""
        place, source = len(self.tensors), _Source(value)
        before = self._former[place] if place < len(self._former) else None
        kept = before is not None and (source.is_same(before[1]) or _equal(before[0], value.detach()))
        self.tensors.append(before[0] if kept and before is not None else _copied(value))
        self.sources.append(source)
        return place

    def _array(self, value: Any) -> Tree:
        try:
            place = self._add(torch.from_numpy(np.array(value, copy=True)))
        except (TypeError, ValueError):  # of texts or objects
            self.whole = False
            return {"is": "other", "class": f"array of {value.dtype}", "shown": repr(value)}
        return {"is": "array", "at": place, "scalar": isinstance(value, np.generic), "dtype": str(value.dtype)}

    def _generator(self, value: Any) -> Tree:
        if isinstance(value, torch.Generator):
            return {"is": "generator", "at": self._add(value.get_state())}
        if isinstance(value, np.random.Generator):
            return {"is": "generator", "state": _plain(value.bit_generator.state)}
        state = value.get_state() if isinstance(value, np.random.RandomState) else value.getstate()
        return {"is": "generator", "state": _plain(state)}


class _Source:
    """Recognises a large tensor that nothing has written to since; small ones are compared by their numbers."""

    LARGE = 1 << 18  # numbers

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        large = tensor.numel() > self.LARGE and not tensor.is_inference()
        self._mark = (tensor.data_ptr(), tensor._version) if large else None

    def is_same(self, other: Any) -> bool:
        """Whether ``other`` is of the same tensor, with nothing written since."""
        return self._mark is not None and self._tensor() is other._tensor() and self._mark == other._mark


def _copied(value: Tensor) -> Tensor:
    return value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _class(value: Any) -> list[str]:
    return [type(value).__module__, type(value).__qualname__]


def _text(value: Any) -> dict[str, Any] | None:
    """Values that a text says everything of; None for others."""
    if isinstance(value, enum.Enum):
        return {"is": "enum", "class": _class(value), "name": value.name}
    if isinstance(value, (torch.dtype, torch.device)):
        return {"is": type(value).__name__, "text": str(value).removeprefix("torch.")}
    if isinstance(value, (complex, bytes)):
        return {"is": "literal", "text": repr(value)}
    if isinstance(value, (range, slice)):
        return {"is": type(value).__name__, "parts": [value.start, value.stop, value.step]}
    return None


def _shown(value: Any) -> str:
    """What tells two opaque values apart, as far as their text does."""
    return ADDRESS.sub("", repr(value)) if type(value).__repr__ is not object.__repr__ else ""


def _plain(state: Any) -> Any:
    """The state of a generator as JSON."""
    if isinstance(state, np.ndarray):
        return {"array": state.tolist(), "dtype": str(state.dtype)}
    if isinstance(state, Mapping):
        return {key: _plain(one) for key, one in state.items()}
    if isinstance(state, (tuple, list)):
        return [_plain(one) for one in state]
    return state.item() if isinstance(state, np.generic) else state


def _equal(mine: Tensor, other: Tensor) -> bool:
    """Whether all bits that matter are equal; NaN is equal to NaN."""
    if mine.shape != other.shape or mine.dtype != other.dtype or mine.device != other.device:
        return False
    if torch.equal(mine, other):
        return True
    return bool(((mine == other) | ((mine != mine) & (other != other))).all()) if mine.numel() else True
