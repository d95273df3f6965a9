"""Save and restore the state of a user's module besides its weights: every attribute that is plain data.

A checkpoint and the best weights hold parameters, buffers, what ``get_extra_state`` returns, and every attribute of
every submodule that is plain data: numbers, strings, None, tensors, NumPy arrays, and lists, tuples, dicts, sets and
deques of them. Always all of them: no rule decides which of them matter. What is none of these is opaque: it is never
saved, and a module whose calls depend on it cannot be resumed (:mod:`weft.runtime.step.preflight`).
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction

from weft.core.errors import SpecError

SCALARS = (type(None), bool, int, float, str)
SEQUENCES = {kind.__name__: kind for kind in (list, tuple, set, frozenset, deque)}
MAPPINGS = {kind.__name__: kind for kind in (dict, OrderedDict)}
COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
}
CLOCK = "clock"  # the buffer of Weft's modules that count their draws, which have a state per member
EXTRA = "_extra_state"  # as torch's state_dict calls it
FROZEN = "frozen"  # a parameter of the training state that a call has frozen
TORCHS = frozenset((*vars(nn.Module()), "_compiled_call_impl"))  # tables and flags that every module has
OF_ITS_CLASS = "torch_geometric.inspector"  # PyG's notes on the methods of a class, filled in by its first module
OF_RANKS = ("weft.dist.reduce", "weft.ops.reduce")  # how Weft's norms join rows: set before every training
OF_CONVERTED = "_weft_"  # what a converted layer of PyG has besides
COMPARED = 1 << 22  # numbers of a tensor: larger ones are the same if torch counts no write to them
MARKED = 1 << 12  # numbers of a tensor inside of an opaque attribute that are compared
LOCKS = (type(threading.Lock()), type(threading.RLock()))  # hold nothing between calls
MOST_VALUES = 100_000  # values of one attribute that are searched for tensors
TEXT = "module_state"  # the name in a file; tensors are called "module_state.NAME"


# ---- Tensors: whether two are equal, where their memory is, and which of them lie in that of a weight.


def same_numbers(now: Tensor, before: Tensor, near: float = 0.0) -> bool:
    """True if all numbers are equal, up to ``near`` of each if they are no whole numbers; a NaN equals a NaN."""
    if now.shape != before.shape or now.dtype != before.dtype or now.device != before.device:
        return False
    if near and (now.is_floating_point() or now.is_complex()):
        return torch.allclose(now, before, rtol=near, atol=1e-7, equal_nan=True)
    return torch.equal(now, before) or bool(((now == before) | ((now != now) & (before != before))).all())


def memory_of(tensor: Tensor) -> int:
    """A key that is equal for tensors that share memory; of sparse ones and in torch's transforms, one of each."""
    try:
        with DisableTorchFunction():
            return tensor.untyped_storage().data_ptr() or -id(tensor)
    except (NotImplementedError, RuntimeError):
        return -id(tensor)


def has_values(tensor: Tensor) -> bool:
    """False for meta tensors, uninitialised parameters and tensors of all members of a stack at once."""
    return not (
        tensor.is_meta or nn.parameter.is_lazy(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor's numbers in its storage, and the one after the last."""
    size, first = tensor.element_size(), tensor.storage_offset() * tensor.element_size()
    reach = sum((length - 1) * abs(step) for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (reach + 1) * size if tensor.numel() else first


class WeightMemory:
    """Finds the parameter or buffer of ``model``, among ``names`` (None: all), whose memory a tensor lies in."""

    def __init__(self, model: nn.Module, names: Collection[str] | None = None) -> None:
        registered = (*model.named_parameters(), *model.named_buffers())
        self.tensors = {name: tensor for name, tensor in registered if names is None or name in names}
        self._by_storage: dict[int, list[str]] = {}
        for name, tensor in self.tensors.items():
            self._by_storage.setdefault(memory_of(tensor), []).append(name)

    def owner(self, tensor: Tensor) -> str | None:
        """The name of the parameter or buffer that ``tensor`` is, or whose numbers it shares."""
        for name in self._by_storage.get(memory_of(tensor), ()):
            registered = self.tensors[name]
            if registered is tensor:
                return name
            (first, end), (start, last) = _bytes_of(registered), _bytes_of(tensor)
            if registered.dtype == tensor.dtype and first < last and start < end:
                return name
        return None

    def shared(self) -> Iterator[tuple[str, str]]:
        """Pairs of names whose tensors lie in one memory."""
        for names in self._by_storage.values():
            for index, name in enumerate(names):
                (first, end) = _bytes_of(self.tensors[name]) if len(names) > 1 else (0, 0)
                for other in names[index + 1 :]:
                    start, last = _bytes_of(self.tensors[other])
                    if first < last and start < end:
                        yield name, other

    def view(self, name: str, tensor: Tensor) -> list[Any] | None:
        """Shape, strides and offset of ``tensor`` in the memory of ``name``; None if it is that parameter itself."""
        registered = self.tensors[name]
        if registered is tensor and isinstance(tensor, nn.Parameter):
            return None
        return [list(tensor.shape), list(tensor.stride()), tensor.storage_offset() - registered.storage_offset()]


@dataclass(frozen=True)
class Follower:
    """A tensor that a module keeps in its attribute ``name``, in the memory of its weight or buffer ``owner``.

    Training keeps weights in a flat buffer. In a plain loop a view of a weight (``layer.weight.detach()``) follows
    every update; here it does once it is a view of the flat buffer.
    """

    name: str
    owner: str
    tensor: Tensor
    view: list[Any]

    def follow(self, owner: Tensor) -> None:
        """Move to the same part of the memory of ``owner``."""
        with torch.no_grad():
            self.tensor.data = part_of(owner, self.view)


def part_of(owner: Tensor, view: list[Any]) -> Tensor:
    """The inverse of :meth:`WeightMemory.view`: shape, strides and offset in the memory of ``owner``."""
    shape, stride, start = view
    return owner.detach().as_strided(shape, stride, owner.storage_offset() + start)


def followers(model: nn.Module, held: Collection[str]) -> list[Follower]:
    """The tensors in attributes of ``model`` that lie in the memory of the weights and buffers ``held``."""
    memory, modules = WeightMemory(model, held), {id(module) for module in model.modules()}
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    result = []
    for name, _, _, value in attributes(model):
        for tensor in reachable(value, modules):
            if not isinstance(tensor, Tensor) or id(tensor) in trained or tensor.layout is not torch.strided:
                continue
            owner = memory.owner(tensor)
            if owner is not None:
                view = memory.view(owner, tensor) or [list(tensor.shape), list(tensor.stride()), 0]
                result.append(Follower(name, owner, tensor, view))
    return result


def reachable(value: Any, skipped: Collection[int] = ()) -> Iterator[Any]:
    """Values in containers, objects and variables of functions, each once; ids in ``skipped`` are not entered."""
    seen, waiting = set(skipped), [value]
    while waiting and len(seen) < MOST_VALUES:
        value = waiting.pop()
        if type(value) in SCALARS or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            waiting += value
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, FunctionType):
            waiting += variables_of(value).values()
        elif isinstance(value, MethodType):
            waiting += [value.__self__, value.__func__]
        elif isinstance(value, partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif (
            hasattr(value, "__dict__")
            and not isinstance(value, (type, ModuleType, Tensor))
            and not type(value).__module__.startswith(("weft.ops", "weft.graph", "weft.batches"))
        ):
            waiting += vars(value).values()


def variables_of(function: FunctionType) -> dict[str, Any]:
    """The variables that a function has from outside of it, and its defaults, by name."""
    variables: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it has no value yet
            variables[name] = cell.cell_contents
    defaults, names = function.__defaults__ or (), function.__code__.co_varnames[: function.__code__.co_argcount]
    return variables | dict(zip(reversed(names), reversed(defaults), strict=False)) | (function.__kwdefaults__ or {})


# ---- Attributes: where a module has its own data, and what is plain among it.


def attributes(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """Full name, table, key and value of everything that ``model`` keeps except registered tensors and modules."""
    for prefix, module in model.named_modules():
        if CLOCK in module._buffers or isinstance(module, torch.jit.ScriptModule):
            continue
        for key, value in vars(module).items():
            if key in TORCHS or key.startswith(OF_CONVERTED) or type(value).__module__ in (OF_ITS_CLASS, *OF_RANKS):
                continue
            yield f"{prefix}.{key}" if prefix else key, module.__dict__, key, value


class _Marker(pickle.Pickler):
    """Pickles values that are not plain data, to compare them and not to load them again."""

    def __init__(self, file: io.BytesIO, modules: Mapping[int, str]) -> None:
        super().__init__(file)
        self.fast = True  # without a memo equal values have equal bytes
        self._modules = modules

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if not has_values(value) or value.is_inference() or value.layout is not torch.strided:
                return type(value).__name__, tuple(value.shape)
            small = value.numel() <= MARKED
            return small and value.detach().cpu().reshape(-1).tolist(), tuple(value.shape), not small and value._version
        return self._modules.get(id(value)) if isinstance(value, nn.Module) else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType):
            return tuple, ((value.__code__.co_code, variables_of(value)),)
        if isinstance(value, torch.Generator):
            return bytes, (value.get_state().numpy().tobytes(),)
        if isinstance(value, (*LOCKS, weakref.ref)):
            return str, (type(value).__name__,)
        return NotImplemented


def opaque_marks(model: nn.Module, names: Collection[str]) -> dict[str, bytes]:
    """For each of the attributes ``names`` bytes that are equal as long as its value is; none if it cannot be read."""
    modules, marks = {id(module): name for name, module in model.named_modules()}, {}
    for name, _, _, value in attributes(model):
        if name in names:
            file = io.BytesIO()
            try:
                _Marker(file, modules).dump(value)
                marks[name] = file.getvalue()
            except Exception:  # generators, files, values that hold themselves: nothing says what is in them
                continue
    return marks


class NotPlain(Exception):
    """Raised for a value that is not plain data, with its type."""


@dataclass(frozen=True)
class ModuleState:
    """Plain data of a module at one time: JSON ``trees`` by attribute, and the ``tensors`` that they name.

    ``opaque``: names of attributes that are not plain data, with their types. ``unsaved``: what the module's calls
    depend on though it is not saved, empty if nothing; ``evaluates``: whether evaluations do without that.
    """

    trees: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    opaque: dict[str, str] = field(default_factory=dict)
    unsaved: str = ""
    evaluates: bool = True

    def differences(self, other: ModuleState, near: float = 0.0) -> list[str]:
        """Names of attributes whose values differ, by more than ``near`` of the largest if they are tensors."""
        mine, its = self.trees, other.trees
        names = [name for name in {**mine, **its} if mine.get(name, NotPlain) != its.get(name, NotPlain)]
        for label in self.tensors.keys() & other.tensors.keys():
            tensor, other_tensor = self.tensors[label], other.tensors[label]
            if tensor is not other_tensor and not same_numbers(tensor, other_tensor, near):
                names.append(label.rpartition(":")[0])
        return sorted(set(names))

    def to_tensors(self, more: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """The contents of a file; ``more``: JSON to save with it."""
        text_parts = {"trees": self.trees, "opaque": self.opaque, "unsaved": self.unsaved, "evaluates": self.evaluates}
        text = json.dumps({**text_parts, **(more or {})})
        named = {f"{TEXT}.{name}": tensor.cpu().clone() for name, tensor in self.tensors.items()}
        return {TEXT: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), **named}

    @classmethod
    def from_tensors(cls, saved: Mapping[str, Tensor]) -> ModuleState:
        """The inverse of :meth:`to_tensors`."""
        text = saved_text(saved)
        named = {n.removeprefix(f"{TEXT}."): tensor for n, tensor in saved.items() if n.startswith(f"{TEXT}.")}
        trees, opaque = text.get("trees", {}), text.get("opaque", {})
        return cls(trees, named, opaque, text.get("unsaved", ""), text.get("evaluates", True))


def saved_text(saved: Mapping[str, Tensor]) -> dict[str, Any]:
    """The JSON of a file that :meth:`ModuleState.to_tensors` made; empty if there is none."""
    text: dict[str, Any] = json.loads(bytes(saved[TEXT].tolist())) if TEXT in saved else {}
    return text


# ---- Encode: plain data as JSON and tensors, again only where storage, version or numbers changed.


class StateReader:
    """Reads the state of ``model``; ``held``: names of parameters and buffers that the training state has anyway.

    Tensors that have not changed since the last reading are not copied again.
    """

    def __init__(self, model: nn.Module, held: Collection[str]) -> None:
        self._model, self._held = model, frozenset(held)
        self._last: dict[str, tuple[tuple[Any, ...], Tensor]] = {}  # by label: which tensor it was, and its copy

    def __call__(self) -> ModuleState:
        """The state now."""
        self._memory: WeightMemory | None = None
        self._seen: dict[int, tuple[int, Any]] = {}  # number and value of what is encoded already
        self._tensors: dict[str, tuple[Tensor, dict[str, Any]]] = {}
        opaque: dict[str, str] = {}
        trees: dict[str, Any] = {}
        own_attributes = ((name, value) for name, _, _, value in attributes(self._model))
        for name, value in (*self._registered(), *own_attributes):
            if type(value) in SCALARS:
                trees[name] = value
                continue
            seen = len(self._seen)
            try:
                registered = name.startswith(("_parameters:", "_buffers:"))
                trees[name] = self._tensor(name, value, True) if registered else self._encode(name, value)
            except NotPlain as error:
                # What it shares with later attributes is encoded with those.
                self._seen = {key: entry for key, entry in self._seen.items() if entry[0] < seen}
                if name.startswith(f"{EXTRA}:"):
                    raise SpecError(
                        f"get_extra_state of model {type(self._model).__name__} returns a {error}; return numbers, "
                        "strings, tensors, arrays, and lists, tuples, dicts and sets of them"
                    ) from None
                opaque[name] = str(error)
                self._tensors = {n: t for n, t in self._tensors.items() if n.rpartition(":")[0] != name}
        for name, parameter in self._model.named_parameters():
            if name in self._held and isinstance(parameter, nn.Parameter) and not parameter.requires_grad:
                trees[f"{FROZEN}:{name}"] = True
        return ModuleState(trees, self._stored(), opaque)

    def _registered(self) -> Iterator[tuple[str, Any]]:
        """Parameters that do not train, buffers that calls made, and what ``get_extra_state`` returns."""
        registered = (*self._model.named_parameters(), *self._model.named_buffers())
        held = {id(tensor) for name, tensor in registered if name in self._held}  # under all of their names
        for prefix, module in self._model.named_modules():
            for kind in ("_parameters", "_buffers"):
                for key, tensor in getattr(module, kind).items() if CLOCK not in module._buffers else ():
                    if tensor is not None and id(tensor) not in held:
                        yield f"{kind}:{prefix}.{key}" if prefix else f"{kind}:{key}", tensor
            scripted = isinstance(module, torch.jit.ScriptModule)
            if type(module).get_extra_state is not nn.Module.get_extra_state and not scripted:
                yield f"{EXTRA}:{prefix}", module.get_extra_state()

    def _encode(self, name: str, value: Any) -> Any:
        """``value`` as a tree; a :class:`NotPlain` if it is none."""
        kind = type(value)
        if kind in SCALARS:
            return value
        if isinstance(value, np.generic):
            return {"is": "scalar", **self._array(name, np.asarray(value))}
        if kind is complex:
            return {"is": "complex", "parts": [value.real, value.imag]}
        if kind is bytes:
            return {"is": "bytes", "hex": value.hex()}
        if kind in (torch.dtype, torch.device):
            return {"is": kind.__name__, "text": str(value).removeprefix("torch.")}
        if id(value) in self._seen:
            return {"is": "again", "number": self._seen[id(value)][0]}
        number = len(self._seen)
        self._seen[id(value)] = number, value  # kept alive, so that no other value has its id
        if isinstance(value, Tensor):
            tree = self._tensor(name, value)
            tree["number"] = number
            return tree
        if kind is np.ndarray:
            return {"is": "array", "number": number, **self._array(name, value)}
        if kind is torch.Size:
            return {"is": "tuple", "number": number, "items": list(value)}
        if kind in SEQUENCES.values():
            more = {"maxlen": value.maxlen} if kind is deque else {}
            items = [self._encode(name, item) for item in value]
            return {"is": kind.__name__, "number": number, "items": items, **more}
        if kind in MAPPINGS.values():
            pairs = [[self._encode(name, key), self._encode(name, item)] for key, item in value.items()]
            return {"is": kind.__name__, "number": number, "pairs": pairs}
        raise NotPlain(kind.__name__)

    def _tensor(self, name: str, value: Tensor, registered: bool = False) -> dict[str, Any]:
        if not has_values(value):
            raise NotPlain("tensor without values")
        if self._memory is None:
            self._memory = WeightMemory(self._model)
        owner = None if registered else self._memory.owner(value)
        if owner is not None:
            return {"is": "weight", "name": owner, "view": self._memory.view(owner, value)}
        grad = value.requires_grad if isinstance(value, nn.Parameter) else None
        tree: dict[str, Any] = {"is": "tensor", "host": value.device.type == "cpu", "parameter": grad}
        tree |= {"registered": True} if registered else {}
        if value.layout is torch.sparse_coo:
            parts, tree["coalesced"] = [value._indices(), value._values()], value.is_coalesced()
        elif value.layout in COMPRESSED:
            parts = [getattr(value, part)() for part in COMPRESSED[value.layout]]
        elif value.layout is torch.strided:
            return self._add(name, value, tree)
        else:
            raise NotPlain(str(value.layout))
        added = [self._add(name, part, {}) for part in parts]
        return {**tree, "is": "sparse", "layout": str(value.layout), "size": list(value.shape), "parts": added}

    def _array(self, name: str, value: np.ndarray) -> dict[str, Any]:
        try:
            return self._add(name, torch.from_numpy(np.array(value, copy=True)), {"dtype": str(value.dtype)})
        except (TypeError, ValueError):
            raise NotPlain(f"array of {value.dtype}") from None

    def _add(self, name: str, value: Tensor, tree: dict[str, Any]) -> dict[str, Any]:
        tree["at"] = f"{name}:{len(self._tensors)}"
        self._tensors[tree["at"]] = value, tree
        return tree

    def _stored(self) -> dict[str, Tensor]:
        """The tensors to save: one per storage, of which tensors that share it are views."""
        by_storage: dict[int, list[str]] = {}
        for label, (tensor, _) in self._tensors.items():
            by_storage.setdefault(memory_of(tensor), []).append(label)
        stored_tensors, last, self._last = {}, self._last, {}
        for labels in by_storage.values():
            first = self._tensors[labels[0]][0]
            if len(labels) > 1 and len({self._tensors[label][0].dtype for label in labels}) == 1:
                whole = torch.empty(0, dtype=first.dtype, device=first.device).set_(first.untyped_storage())
                for label in labels:
                    tensor, tree = self._tensors[label]
                    tree |= {
                        "at": labels[0],
                        "view": [list(tensor.shape), list(tensor.stride()), tensor.storage_offset()],
                    }
                stored_tensors[labels[0]] = self._copy(labels[0], whole, first._version, last)
            else:
                for label in labels:
                    tensor = self._tensors[label][0]
                    stored_tensors[label] = self._copy(
                        label, tensor, 0 if tensor.is_inference() else tensor._version, last
                    )
        return stored_tensors

    def _copy(self, label: str, tensor: Tensor, version: int, last: Mapping[str, tuple[Any, Tensor]]) -> Tensor:
        mark = memory_of(tensor), version, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())
        before, copy = last.get(label, (None, None))
        unwritten = before == mark and tensor.numel() > COMPARED
        if copy is None or not (unwritten or same_numbers(tensor.detach(), copy)):
            copy = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        self._last[label] = mark, copy
        return copy


# ---- Restore: into the objects that are there, since functions and other attributes may hold them.


def restore_state(model: nn.Module, state: ModuleState, exact: bool = True) -> None:
    """Give ``model`` the attributes of ``state``; ``exact``: plain ones that it did not have then are removed.

    A :class:`SpecError` if a part of the model that had some is not there.
    """
    decoder = _Decoder(model, state)
    tables = {name: (table, key) for name, table, key, _ in attributes(model)}
    for name, tree in state.trees.items():
        kind, _, path = name.rpartition(":")  # an attribute has no kind
        owner, key = (path, EXTRA) if kind == EXTRA else (path.rpartition(".")[0], path.rpartition(".")[2])
        try:
            module = model.get_submodule(owner)
        except AttributeError:
            raise SpecError(
                f"model {type(model).__name__} has no part {owner!r} before it is called, and the saved {key!r} "
                "belongs to it: make it in the constructor"
            ) from None
        if kind == EXTRA:
            module.set_extra_state(decoder(tree))
        elif kind == FROZEN:
            module.get_parameter(key).requires_grad_(False)
        elif kind:
            table = getattr(module, kind)
            table[key] = decoder(tree, table.get(key))
            module.__dict__.pop(key, None)  # a constructor may have set it to None, which would hide it
        else:
            module.__dict__[key] = decoder(tree, module.__dict__.get(key))
    for name, (table, key) in tables.items() if exact else ():
        if name not in state.trees and name not in state.opaque:
            table.pop(key, None)


class _Decoder:
    def __init__(self, model: nn.Module, state: ModuleState) -> None:
        self._tensors, self._memory = state.tensors, WeightMemory(model)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._made: dict[int, Any] = {}
        self._storages: dict[str, Tensor] = {}

    def __call__(self, tree: Any, template: Any = None) -> Any:
        if not isinstance(tree, dict):
            return tree
        kind = tree["is"]
        if kind == "again":
            return self._made[tree["number"]]
        if kind in SEQUENCES or kind in MAPPINGS:
            return self._container(kind, tree, template)
        if kind == "complex":
            return complex(*tree["parts"])
        if kind == "bytes":
            return bytes.fromhex(tree["hex"])
        if kind in ("dtype", "device"):
            return getattr(torch, tree["text"]) if kind == "dtype" else torch.device(tree["text"])
        made = self._array(tree, template) if kind in ("array", "scalar") else self._tensor(kind, tree, template)
        self._made[tree.get("number", -1)] = made
        return made

    def _container(self, kind: str, tree: dict[str, Any], template: Any) -> Any:
        mutable = kind not in ("tuple", "frozenset")
        make = MAPPINGS.get(kind) or SEQUENCES[kind]
        made: Any = None
        if mutable:
            new = deque(maxlen=tree["maxlen"]) if kind == "deque" else make()
            made = self._made[tree["number"]] = template if type(template) is make else new
        if kind in MAPPINGS:
            old = dict(template) if isinstance(template, Mapping) else {}
            pairs = [(self(key), item) for key, item in tree["pairs"]]
            pairs = [(key, self(item, old.get(key))) for key, item in pairs]
            made.clear()
            made.update(pairs)
            return made
        items = list(template) if isinstance(template, (list, tuple, deque)) else []
        items += [None] * len(tree["items"])
        values = [self(item, items[index]) for index, item in enumerate(tree["items"])]
        if not mutable:
            made = self._made[tree["number"]] = make(values)
        else:
            made.clear()
            (made.update if kind == "set" else made.extend)(values)
        return made

    def _array(self, tree: dict[str, Any], template: Any) -> Any:
        value = self._stored(tree, torch.device("cpu")).numpy().astype(tree["dtype"])
        if tree["is"] == "scalar":
            return value[()]
        if isinstance(template, np.ndarray) and (template.shape, template.dtype) == (value.shape, value.dtype):
            template[...] = value
            return template
        return value

    def _tensor(self, kind: str, tree: dict[str, Any], template: Any) -> Tensor:
        if kind == "weight":
            there = isinstance(template, Tensor) and self._memory.owner(template) == tree["name"]
            owner, view = self._memory.tensors[tree["name"]], tree["view"]
            return template if there else owner if view is None else part_of(owner, view)
        device = torch.device("cpu") if tree["host"] else self._device
        if kind == "sparse":
            parts, layout = (
                [self._stored(part, device) for part in tree["parts"]],
                tree["layout"].removeprefix("torch."),
            )
            if layout == "sparse_coo":
                is_coalesced = {"is_coalesced": tree["coalesced"]}
                return torch.sparse_coo_tensor(*parts, tree["size"], check_invariants=False, **is_coalesced)
            options = {"layout": getattr(torch, layout), "check_invariants": False}
            return torch.sparse_compressed_tensor(*parts, tree["size"], **options)
        value = self._stored(tree, device)
        alike = isinstance(template, Tensor) and (template.shape, template.dtype) == (value.shape, value.dtype)
        alike = alike and template.device == value.device and "view" not in tree
        alike = alike and template.layout is torch.strided and 0 not in template.stride()  # no number lies there twice
        if alike and ("registered" in tree or self._memory.owner(template) is None):
            template.data.copy_(value)
            return template
        return value if tree["parameter"] is None else nn.Parameter(value, tree["parameter"])

    def _stored(self, tree: dict[str, Any], device: torch.device) -> Tensor:
        """A copy of a stored tensor, or a view of the one storage that several tensors share."""
        if "view" not in tree:
            return self._tensors[tree["at"]].detach().to(device, copy=True)
        if tree["at"] not in self._storages:
            self._storages[tree["at"]] = self._tensors[tree["at"]].detach().to(device, copy=True)
        shape, stride, start = tree["view"]
        return self._storages[tree["at"]].as_strided(shape, stride, start)


# ---- Generators of Python and NumPy, which a module may draw from in its calls.


def python_generators() -> dict[str, Any]:
    """The states of Python's and NumPy's generators as JSON."""
    kind, keys, *rest = np.random.get_state()
    return {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest]}


def restore_python_generators(states: Mapping[str, Any]) -> None:
    """The inverse of :func:`python_generators`."""
    version, state, gauss = states["python"]
    random.setstate((version, tuple(state), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


def with_tensors(state: ModuleState, tensors: Mapping[str, Tensor]) -> ModuleState:
    """``state`` with these buffers, which a ``state_dict`` leaves out."""
    trees = {
        f"_buffers:{n}": {"is": "tensor", "host": False, "parameter": None, "registered": True, "at": f"_buffers:{n}:"}
        for n in tensors
    }
    named = {f"_buffers:{name}:": tensor.detach().clone() for name, tensor in tensors.items()}
    return replace(state, trees={**state.trees, **trees}, tensors={**state.tensors, **named})


# ---- GlobalsSnapshot: what the code of a user's module keeps outside of it, and how to restore that.
#
# All copies of a module share the attributes of its classes, the global variables that its methods name, what these
# methods have in closures, defaults and attributes, context variables, ``os.environ`` and the caches of ``functools``.
# A dry run and a preflight call copies: the training that follows must find all of it as it was.

LIBRARIES = ("torch", "torch_geometric", "weft", "numpy", "builtins")  # whose state is not a user's
DEPTH = 3  # functions that functions call, and containers in containers
MOST_ITEMS = 1000  # of a container that are looked into
COPIED = 1 << 18  # numbers of a tensor: writes to larger ones through .data are not noticed
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
CACHED = type(lru_cache(lambda: None))
WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
CONTAINERS = (list, deque, set, dict, OrderedDict, defaultdict, Counter, type(os.environ), *WEAK)

Variables = dict[tuple[int, str], tuple[Any, Any]]  # table and value by the table's id and the name


class GlobalsSnapshot:
    """Variables outside of ``model`` now: which values they have, and what is in containers and objects of the user's.

    Objects of libraries, as a graph that builds a form of itself when it is first read, are not looked into.
    """

    def __init__(self, model: nn.Module) -> None:
        kinds = {kind: None for module in model.modules() for kind in type(module).__mro__ if not is_library(kind)}
        self._classes = list(kinds)
        self._files = {kind.__module__ for kind in self._classes}
        self._variables = self._found()
        self._contents: dict[int, tuple[str, Any, Any]] = {}  # by the id of a thing: a name, the thing, what is in it
        for (_, key), (table, value) in self._variables.items():
            self._note(f"{table.__name__}.{key}" if isinstance(table, type) else key, value, DEPTH)

    def changed(self) -> list[str]:
        """Names of variables with another value or content than in the snapshot; caches do not count."""
        names = []
        for key, (table, value) in self._found().items():
            old = self._variables.get(key, (None, NotPlain))[1]
            if _function_in(value)[1] is None and not _is_equal(old, value):
                names.append(f"{table.__name__}.{key[1]}" if isinstance(table, type) else key[1])
        names += [name for name, thing, content in self._contents.values() if not _has_content(thing, content)]
        return list(dict.fromkeys(names))

    def restore(self) -> None:
        """Give variables and containers what they had; variables that have come since are removed."""
        for key, (table, value) in self._found().items():
            if _function_in(value)[1] is not None:
                continue  # see fresh_caches
            if key not in self._variables:
                delattr(table, key[1]) if isinstance(table, type) else table.pop(key[1])
            elif self._variables[key][1] is not value:
                _assign(table, key[1], self._variables[key][1])
        for _, thing, content in self._contents.values():
            if _has_content(thing, content):
                continue
            if isinstance(thing, np.random.Generator):
                thing.bit_generator.state = content
            elif isinstance(thing, random.Random):
                thing.setstate(content)
            elif isinstance(thing, GENERATORS):
                thing.set_state(content)
            elif isinstance(thing, ContextVar):
                thing.set(content) if content is not NotPlain else None  # it cannot be unset again
            elif not isinstance(thing, Tensor):
                table = thing if isinstance(thing, CONTAINERS) else thing.__dict__
                table.clear()
                (table.extend if isinstance(table, (list, deque)) else table.update)(content)
            elif isinstance(content, Tensor):
                thing.data.copy_(content)

    @contextmanager
    def fresh_caches(self) -> Iterator[None]:
        """Inside, functions with a cache of ``functools`` have an empty one; afterwards each has its own again."""
        cached = [(table, key, value) for (_, key), (table, value) in self._found().items() if _function_in(value)[1]]
        for table, key, value in cached:
            function, cache = _function_in(value)
            fresh: Any = lru_cache(**cache.cache_parameters())(function)
            if isinstance(value, property):
                fresh = property(fresh, value.fset, value.fdel)
            elif isinstance(value, (staticmethod, classmethod)):
                fresh = type(value)(fresh)
            _assign(table, key, fresh)
        try:
            yield
        finally:
            for table, key, value in cached:
                _assign(table, key, value)

    def _found(self) -> Variables:
        """Table and value of every variable that the classes have or their code names, by table and name."""
        variables: Variables = {}
        for kind in self._classes:
            for key, value in list(vars(kind).items()):
                function, cache = _function_in(value)
                if function is not None:
                    variables |= _globals_of(function, DEPTH)
                    variables |= {(id(function), name): ({}, held) for name, held in variables_of(function).items()}
                    variables |= _attributes_of(function)
                if (function is None or cache is not None) and not key.startswith("__"):
                    variables[id(kind), key] = kind, value
        return variables

    def _note(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, (*GENERATORS, ContextVar)) or (
            isinstance(value, Tensor) and has_values(value) and not value.is_inference()
        ):
            self._contents[id(value)] = name, value, _content(value)
        if isinstance(value, ContextVar):
            self._note(name, value.get(None), depth - 1)
        is_users = type(value) in CONTAINERS or (hasattr(value, "__dict__") and type(value).__module__ in self._files)
        if not is_users or not depth or id(value) in self._contents or isinstance(value, (type, nn.Module)):
            return
        content = _content(value)
        self._contents[id(value)] = name, value, content
        for item in list(content.values() if isinstance(content, dict) else content)[:MOST_ITEMS]:
            self._note(name, item, depth - 1)


def is_library(thing: Any) -> bool:
    """Whether a class or function comes from a library, whose state is not a user's."""
    return (getattr(thing, "__module__", None) or "builtins").split(".")[0] in LIBRARIES


def _function_in(value: Any) -> tuple[FunctionType | None, Any]:
    """The function behind a method, a static one, a property or a cache of ``functools``, and that cache."""
    inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    cache = inner if isinstance(inner, CACHED) else None
    inner = inner if cache is None else cache.__wrapped__
    return inner if isinstance(inner, FunctionType) else None, cache


def _globals_of(function: FunctionType, depth: int) -> Variables:
    """Global variables that ``function`` names, and those of functions that it names."""
    codes, names = [function.__code__], []
    while codes:
        code = codes.pop()
        names += code.co_names
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    variables: Variables = {}
    for name in dict.fromkeys(names):
        value = function.__globals__.get(name, function)
        called, cache = _function_in(value)
        if value is os:
            variables[id(vars(os)), "environ"] = vars(os), os.environ
        if value is function or isinstance(value, ModuleType):
            continue
        if called is not None and depth and not is_library(called):
            variables |= _globals_of(called, depth - 1) | _attributes_of(called)
        if called is None or cache is not None:
            variables[id(function.__globals__), name] = function.__globals__, value
    return variables


def _attributes_of(function: FunctionType) -> Variables:
    table = vars(function)
    return {(id(table), key): (table, value) for key, value in table.items() if not key.startswith("__")}


def _is_equal(old: Any, new: Any) -> bool:
    """Whether a variable has the same value, as far as that shows without looking into it."""
    return old is new or (type(old) is type(new) and isinstance(new, (int, float, str)) and old == new)


def _content(thing: Any) -> Any:
    """A copy of what is directly in a container or an object, of a tensor, or of the state of a generator."""
    if isinstance(thing, Tensor):
        return thing.detach().clone() if thing.numel() <= COPIED else thing._version
    if isinstance(thing, np.random.Generator):
        return deepcopy(thing.bit_generator.state)
    if isinstance(thing, GENERATORS):
        return thing.getstate() if isinstance(thing, random.Random) else thing.get_state()
    if isinstance(thing, ContextVar):
        return thing.get(NotPlain)
    if isinstance(thing, (list, deque, set)):
        return list(thing)
    return dict(thing if isinstance(thing, CONTAINERS) else vars(thing))


def _has_content(thing: Any, content: Any) -> bool:
    """Whether what is in ``thing`` is still what :func:`_content` returned."""
    now = _content(thing)
    if isinstance(now, Tensor) and isinstance(content, Tensor):
        return same_numbers(now, content)
    if isinstance(now, Tensor) or isinstance(content, Tensor):  # it has grown or shrunk past the largest that is copied
        return False
    if isinstance(thing, GENERATORS):
        return pickle.dumps(now) == pickle.dumps(content)
    if isinstance(thing, (ContextVar, Tensor)):
        return _is_equal(now, content)
    if isinstance(now, dict):
        return now.keys() == content.keys() and all(_is_equal(now[key], content[key]) for key in now)
    return len(now) == len(content) and all(first is second for first, second in zip(now, content, strict=True))


def _assign(table: Any, key: str, value: Any) -> None:
    if isinstance(table, type):
        setattr(table, key, value)
    else:
        table[key] = value
