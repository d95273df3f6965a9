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

from weft.runtime.user_modules.input_writes import same_numbers
from weft.runtime.user_modules.kept.iterators import KINDS as ITERATORS
from weft.runtime.user_modules.kept.iterators import as_parts
from weft.runtime.user_modules.kept.sharing import Sharing, Written
from weft.runtime.user_modules.kept.walking import NOT_DATA, OF_HOOKS, cells, fields

SCALARS = (type(None), bool, int, float, str)
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
}
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
REPLACED = ("tensor", "sparse", "array", "items", "pairs", "object", "generator")
IMMUTABLE = (tuple, frozenset, np.generic)
Tree = Any
Reference = Callable[[Any], "dict[str, Any] | None"]


@dataclass(frozen=True)
class Packed:
    """A value as JSON, and the tensors that it names by their places; ``whole``: it can be given back."""

    tree: Tree
    tensors: tuple[Tensor, ...] = ()
    whole: bool = True

    def same(self, other: Packed | None) -> bool:
        """Whether all values are equal."""
        if other is None or self.tree != other.tree or len(self.tensors) != len(other.tensors):
            return False
        return all(
            mine is its or same_numbers(mine, its) for mine, its in zip(self.tensors, other.tensors, strict=True)
        )

    def near(self, other: Packed | None) -> bool:
        """Whether all values are equal but for the order in which sums on a GPU are added up."""
        if other is None or self.tree != other.tree or len(self.tensors) != len(other.tensors):
            return False
        return all(map(_near, self.tensors, other.tensors))


@dataclass(frozen=True)
class Packing:
    """How the places of one module are packed: ``refer`` names what is not to be copied.

    ``made``: ids of what the constructor made, which is filled again when it is given back, and not replaced.
    """

    refer: Reference
    made: Container[int]
    sharing: Sharing = field(default_factory=Sharing)

    def __call__(self, place: str, value: Any, former: Packed | None = None) -> Packed:
        """The ``value`` of a place now; unchanged tensors are those of ``former``."""
        packer = _Packer(self, place, former)
        tree = packer(value)
        return Packed(tree, tuple(packer.tensors), packer.whole)


class _Packer:
    def __init__(self, packing: Packing, place: str, former: Packed | None) -> None:
        self._refer, self._made, self._sharing = packing.refer, packing.made, packing.sharing
        self._place, self._former = place, () if former is None else former.tensors
        self._written: dict[int, Written] = {}
        self.tensors: list[Tensor] = []
        self.whole = True

    def __call__(self, value: Any) -> Tree:
        if type(value) in SCALARS:
            return value
        found = self._refer(value)
        if found is not None:
            return found
        before = self._written.get(id(value)) or self._sharing.find(value, self._place)
        if before is not None:  # it is packed already, or is being packed
            before.tree["label"] = before.label
            return {"is": "again", "label": before.label}
        tree: dict[str, Any] = {}
        written = Written(self._place, f"{self._place}:{len(self._written)}", tree, value)
        self._written[id(value)] = written
        tree |= self._kind(value)
        if tree["is"] == "iterator" or (id(value) not in self._made and tree["is"] in REPLACED):
            tree["new"] = True
            if self.whole and not isinstance(value, IMMUTABLE):
                self._sharing.add(written)
        if tree["is"] == "tensor":
            self._sharing.share_memory(written)
        return tree

    def _kind(self, value: Any) -> Tree:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, (np.ndarray, np.generic)):
            return self._array(value)
        if isinstance(value, GENERATORS):
            return self._generator(value)
        if isinstance(value, torch.optim.Optimizer):
            return {"is": "optimizer", "state": self(value.state_dict())}
        text = _text(value)
        if text is not None:
            return text
        parts = as_parts(value) if isinstance(value, ITERATORS) else None
        if parts is not None:
            return {"is": "iterator", "maker": parts[0], "parts": self(parts[1]), "state": self(parts[2])}
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            more = {"maxlen": value.maxlen} if isinstance(value, deque) else {}
            return {"is": "items", "class": _class(value), "items": [self(one) for one in value], **more}
        if isinstance(value, Mapping) and hasattr(value, "items"):
            self.whole = self.whole and not any(isinstance(key, (Tensor, nn.Module)) for key in value)
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
        if torch._C._functorch.is_functorch_wrapped_tensor(value) or value.is_meta:  # of several members, or a dry run
            return {"is": "constant", "of": "a tensor without values"}
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
        place = len(self.tensors)
        before = self._former[place] if place < len(self._former) else None
        same = before is not None and same_numbers(before, value.detach())
        self.tensors.append(before if same and before is not None else _copied(value))
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


def _near(mine: Tensor, other: Tensor) -> bool:
    if mine.shape != other.shape or mine.dtype != other.dtype:
        return False
    exact = not mine.is_floating_point() and not mine.is_complex()
    return same_numbers(mine, other) if exact else torch.allclose(mine, other, rtol=1e-5, atol=1e-7, equal_nan=True)
