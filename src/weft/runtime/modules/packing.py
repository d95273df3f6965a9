"""Pack what a module keeps: JSON for numbers, texts, containers and objects, and tensors as they are.

Numbers, texts and None are themselves, everything else is a dict that says what it ``is``. Nothing is pickled: objects
are their attributes, put into the one that the constructor made, or into a new one of a class of the user's own code.
"""

from __future__ import annotations

import ast
import collections
import copy
import enum
import functools
import itertools
import random
import re
import sys
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Container, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.runtime.modules.walking import NOT_DATA, OF_HOOKS, cells, fields, inside
from weft.runtime.modules.writes import Sharing, Written, same_numbers

# ---- Iterators of Python that say where they are: over ranges, lists and tuples, and endless ones of itertools.

MAKERS: dict[str, Callable[..., Any]] = {
    "iter": iter,
    "count": itertools.count,
    "cycle": itertools.cycle,
    "repeat": itertools.repeat,
}
ITERATOR_KINDS = tuple(
    map(type, (iter(range(0)), iter([]), iter(()), itertools.count(), itertools.cycle(()), itertools.repeat(0)))
)


def as_parts(iterator: Any) -> tuple[str, list[Any], Any] | None:
    """Which of :data:`MAKERS` makes an iterator, of what, and the state that it is then given; None if none does."""
    try:
        with warnings.catch_warnings():  # itertools' own are not to be asked from Python 3.14 on
            warnings.simplefilter("ignore")
            maker, parts, *rest = iterator.__reduce__()
    except TypeError:
        return None
    name = next((name for name, one in MAKERS.items() if one is maker), None)
    return None if name is None else (name, list(parts), rest[0] if rest else None)


def from_parts(maker: str, parts: list[Any], state: Any) -> Any:
    """The inverse of :func:`as_parts`."""
    made = MAKERS[maker](*parts)
    if state is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made.__setstate__(tuple(state) if isinstance(state, list) else state)
    return made


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
        parts = as_parts(value) if isinstance(value, ITERATOR_KINDS) else None
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


# ---- Give back what a module kept, as :mod:`weft.runtime.modules.packing` wrote it down.
#
# What the constructor made is filled in place, since others may hold it; what calls have made is made anew.

KINDS = (list, tuple, set, frozenset, dict, deque, collections.OrderedDict, collections.Counter, torch.Size)
Referred = Callable[[dict[str, Any]], Any]


class CannotUnpack(Exception):
    """Raised for what cannot be made again, with the reason."""


def unpack(
    packed: Packed,
    template: Any,
    refer: Referred,
    shared: Callable[[Tensor], bool],
    model: nn.Module,
    done: dict[str, Any],
) -> Any:
    """The value of ``packed``; ``template``: what is in its place now, ``refer``: what a reference is to.

    ``shared``: whether a tensor is in the memory of a weight, and must not be filled; ``done``: what is made already,
    for other places that refer to it.
    Classes are looked for among those of Python, of torch's layers and of the files that ``model`` comes from.
    """
    return _Unpacker(packed, refer, shared, model, done)(packed.tree, template)


class _Unpacker:
    def __init__(
        self,
        packed: Packed,
        refer: Referred,
        shared: Callable[[Tensor], bool],
        model: nn.Module,
        done: dict[str, Any],
    ) -> None:
        self._tensors, self._refer, self._shared = packed.tensors, refer, shared
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        kinds = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
        self._files = {name for name in kinds if name != "builtins"}
        self._done = done

    def __call__(self, tree: Tree, template: Any) -> Any:
        if isinstance(tree, list):  # as written before there were other containers
            return [self(one, None) for one in tree]
        if not isinstance(tree, dict):
            return tree
        if "is" not in tree:
            return {key: self(one, None) for key, one in tree.items()}
        if tree["is"] == "again":
            return self._again(tree["label"])
        if tree["is"] == "given":  # a call gives it again
            return template
        if tree["is"] in ("weight", "module"):
            return self._refer(tree)
        return self._noted(tree, getattr(self, f"_is_{tree['is']}")(tree, template))

    def _noted(self, tree: Tree, value: Any) -> Any:
        """``value``, for others that refer to it."""
        if "label" in tree:
            self._done[tree["label"]] = value
        return value

    def _again(self, label: str) -> Any:
        if label not in self._done:
            raise CannotUnpack(f"part of {label.rpartition(':')[0]!r}, which is not there now")
        return self._done[label]

    # ---- containers and objects --------------------------------------------------------------------------

    def _is_items(self, tree: Tree, template: Any) -> Any:
        kind = self._class(tree, template)
        old = list(template) if isinstance(template, (list, tuple, deque)) and type(template) is kind else []
        if issubclass(kind, (list, set, deque)):
            made = template if type(template) is kind and not tree.get("new") else _emptied(kind, template, tree)
            self._noted(tree, made)
        found = self._each(tree["items"], old)
        if issubclass(kind, (list, set, deque)):
            made.clear()
            (made.update if isinstance(made, set) else made.extend)(found)
        else:
            made = kind(*found) if hasattr(kind, "_fields") else kind(found)
        return made

    def _each(self, trees: Sequence[Tree], old: list[Any]) -> list[Any]:
        return [self(one, old[index] if index < len(old) else None) for index, one in enumerate(trees)]

    def _is_pairs(self, tree: Tree, template: Any) -> Any:
        kind = self._class(tree, template)
        made = template if type(template) is kind and not tree.get("new") else _emptied(kind, template, tree)
        self._noted(tree, made)
        old = dict(template) if isinstance(template, MutableMapping) else {}
        found = []
        for key, one in tree["pairs"]:
            name = self(key, None)
            found.append((name, self(one, old.get(name))))
        made.clear()
        for key, one in found:
            made[key] = one
        return made

    def _is_object(self, tree: Tree, template: Any) -> Any:
        kind = self._class(tree, template)
        alike = type(template) is kind
        made = template if alike and not tree.get("new") else copy.copy(template) if alike else kind.__new__(kind)
        self._noted(tree, made)
        if isinstance(made, nn.Module) and not alike:
            made.__dict__ |= {key: collections.OrderedDict() for key in OF_HOOKS}
        for key, one in tree["fields"].items():
            old = _field(template, key) if alike else None
            if isinstance(made, nn.Module) and key.endswith("_hooks"):
                self._hooks(made, key, one, old)
            else:
                _set_field(made, key, self(one, old))
        return made

    def _hooks(self, made: Any, key: str, tree: Tree, old: Any) -> None:
        """Hooks are by numbers that differ from process to process: each is given back in its turn."""
        there = list(old.values()) if isinstance(old, dict) else []
        if len(there) != len(tree["items"]):
            raise CannotUnpack(f"{key} has {len(tree['items'])} functions, and there are {len(there)} now")
        for one, function in zip(tree["items"], there, strict=True):
            self(one, function)
        made.__dict__.setdefault(key, collections.OrderedDict())

    def _is_function(self, tree: Tree, template: Any) -> Any:
        if not isinstance(template, types.FunctionType) or set(cells(template)) != set(tree["cells"]):
            raise CannotUnpack("a function that is not there now")
        self._noted(tree, template)
        holders = dict(zip(template.__code__.co_freevars, template.__closure__ or (), strict=True))
        for name, one in tree["cells"].items():
            holders[name].cell_contents = self(one, holders[name].cell_contents)
        return template

    def _is_constant(self, tree: Tree, template: Any) -> Any:
        if template is None:
            raise CannotUnpack(f"{tree['of']}, which is not there now")
        self._noted(tree, template)
        for one, old in zip(tree.get("parts", ()), inside(template), strict=False):
            if self(one, old) is not old and isinstance(one, dict):
                raise CannotUnpack(f"{tree['of']}, which holds something else now")
        return template

    def _is_iterator(self, tree: Tree, template: Any) -> Any:
        return from_parts(tree["maker"], self(tree["parts"], None), self(tree["state"], None))

    def _is_optimizer(self, tree: Tree, template: Any) -> Any:
        if not isinstance(template, torch.optim.Optimizer):
            raise CannotUnpack("an optimizer that is not there now")
        template.load_state_dict(self(tree["state"], None))
        return template

    def _is_other(self, tree: Tree, template: Any) -> Any:
        raise CannotUnpack(f"a {tree['class']}")

    # ---- numbers -----------------------------------------------------------------------------------------

    def _is_tensor(self, tree: Tree, template: Any) -> Any:
        return self._as_it_was(tree, template, self._tensors[tree["at"]].detach().clone())

    def _is_sparse(self, tree: Tree, template: Any) -> Any:
        parts, size = [self._tensors[at].clone() for at in tree["parts"]], tree["size"]
        layout = getattr(torch, tree["layout"].removeprefix("torch."))
        if layout in COMPRESSED:
            made = torch.sparse_compressed_tensor(*parts, size, layout=layout, check_invariants=False)
        else:
            made = torch.sparse_coo_tensor(*parts, size, is_coalesced=tree["coalesced"], check_invariants=False)
        return self._as_it_was(tree, None, made)

    def _as_it_was(self, tree: Tree, template: Any, value: Tensor) -> Any:
        value = value.to(torch.device("cpu") if tree.get("host") else self._device)
        alike = isinstance(template, Tensor) and template.shape == value.shape and template.dtype == value.dtype
        in_place = alike and not tree.get("new") and template.layout is value.layout is torch.strided
        if in_place and not self._shared(template):
            template.data.copy_(value)
            value = template
        elif tree["parameter"]:
            value = nn.Parameter(value, requires_grad=tree["grad"])
        return self._in_memory(tree["memory"], value, value is template) if "memory" in tree else value

    def _in_memory(self, memory: Tree, value: Tensor, is_there: bool) -> Tensor:
        """``value`` in its part of the memory that it shares with others."""
        label = f"memory of {memory['label']}"
        if is_there:
            whole = torch.empty(0, dtype=value.dtype, device=value.device)
            self._done.setdefault(label, whole.set_(value.untyped_storage()))
            return value
        if label not in self._done:
            self._done[label] = torch.zeros(memory["numbers"], dtype=value.dtype, device=value.device)
        shape, stride, start = memory["view"]
        whole = self._done[label]
        if isinstance(value, nn.Parameter) or whole.numel() != memory["numbers"] or whole.device != value.device:
            return value
        return whole.as_strided(shape, stride, start).copy_(value)

    def _is_array(self, tree: Tree, template: Any) -> Any:
        value = self._tensors[tree["at"]].cpu().numpy().copy().astype(tree["dtype"])
        if tree["scalar"]:
            value = value[()]
        elif not tree.get("new") and isinstance(template, np.ndarray) and template.shape == value.shape:
            template[...] = value
            value = template
        return value

    def _is_generator(self, tree: Tree, template: Any) -> Any:
        state = None if "at" in tree else _as_state(tree["state"])
        made = template
        if isinstance(made, torch.Generator) and state is None:
            made.set_state(self._tensors[tree["at"]].cpu())
        elif isinstance(made, np.random.Generator):
            made.bit_generator.state = state
        elif isinstance(made, np.random.RandomState):
            made.set_state(tuple(state))
        elif isinstance(made, random.Random):
            made.setstate((state[0], tuple(state[1]), state[2]))
        else:
            raise CannotUnpack("a generator that is not there now")
        return made

    # ---- texts -------------------------------------------------------------------------------------------

    def _is_literal(self, tree: Tree, template: Any) -> Any:
        return ast.literal_eval(tree["text"])

    def _is_dtype(self, tree: Tree, template: Any) -> Any:
        return getattr(torch, tree["text"])

    def _is_device(self, tree: Tree, template: Any) -> Any:
        return torch.device(tree["text"])

    def _is_range(self, tree: Tree, template: Any) -> Any:
        return range(*tree["parts"])

    def _is_slice(self, tree: Tree, template: Any) -> Any:
        return slice(*tree["parts"])

    def _is_enum(self, tree: Tree, template: Any) -> Any:
        return self._class(tree, template)[tree["name"]]

    def _class(self, tree: Tree, template: Any) -> Any:
        """The class of a value: the template's, Python's containers, or one of the files that the model is from."""
        module, name = tree["class"]
        if [type(template).__module__, type(template).__qualname__] == tree["class"]:
            return type(template)
        for kind in KINDS:
            if [kind.__module__, kind.__qualname__] == tree["class"]:
                return kind
        found: Any = sys.modules.get(module) if module in self._files or module.startswith("torch.nn.") else None
        for part in name.split("."):
            found = getattr(found, part, None)
        if not isinstance(found, type):
            raise CannotUnpack(f"a {name} of {module}")
        return found


def _emptied(kind: Any, template: Any, tree: Tree) -> Any:
    """A new container like the template."""
    if issubclass(kind, deque):
        return kind(maxlen=tree.get("maxlen"))
    if issubclass(kind, collections.defaultdict):
        if not isinstance(template, kind):
            raise CannotUnpack("a defaultdict that is not there now")
        return kind(template.default_factory)
    return kind()


def _field(value: Any, key: str) -> Any:
    own = getattr(value, "__dict__", {})
    return own[key] if key in own else getattr(value, key, None)


def _set_field(value: Any, key: str, field: Any) -> None:
    """Set an attribute without asking the class, which may forbid it (a frozen dataclass) or do more."""
    if hasattr(value, "__dict__") and not isinstance(getattr(type(value), key, None), types.MemberDescriptorType):
        value.__dict__[key] = field
    else:
        object.__setattr__(value, key, field)


def _as_state(state: Any) -> Any:
    """The inverse of how the state of a generator is written."""
    if isinstance(state, dict) and state.keys() == {"array", "dtype"}:
        return np.array(state["array"], dtype=state["dtype"])
    if isinstance(state, dict):
        return {key: _as_state(one) for key, one in state.items()}
    return [_as_state(one) for one in state] if isinstance(state, list) else state
