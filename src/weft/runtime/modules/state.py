"""KeptState: what a user's module keeps in Python beside its training state, as it is now, and given back later."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode

from weft.core.errors import SpecError
from weft.runtime.modules.packing import SCALARS, CannotUnpack, Packed, Packing, Reference, unpack
from weft.runtime.modules.walking import SCRIPT, Place, Places, Scripted, inside, is_given
from weft.runtime.modules.writes import DATA, Memory, Sharing, storage

EMPTY = {kind: [kind.__module__, kind.__qualname__] for kind in (dict, list, set, OrderedDict)}
ABSENT = Packed({"is": "absent"})
Snapshot = dict[str, Packed]


class KeptState:
    """The state of ``model``, which nothing has called yet; ``held``: names of what its training state holds.

    ``again`` is the same module built anew: what its constructor makes alike is not written down, unless it changes.
    """

    def __init__(self, model: nn.Module, held: Collection[str], again: nn.Module | None = None) -> None:
        self._model, self._held = model, frozenset(held)
        self._places = Places(model, held)
        self._alive = [one for place in self._places for one in _all_in(place.value, self._places)]
        self._made = frozenset(map(id, self._alive))
        self._first = _packed(model if again is None else again, self._held, _Everything(), {})
        self._last: Snapshot = self._first
        self._ignored: frozenset[str] = frozenset()
        self._opaque: Snapshot = {}
        self._caches: dict[str, Packed | None] = {}

    def learn(self, unread: Collection[str], caches: Collection[str], lost: Collection[str], needed: bool) -> None:
        """Leave out what no call reads, and caches as long as they are what the first call made of the graph.

        ``lost``: what changes, and may say nothing of it, as a generator; ``needed``: evaluations read it.
        """
        self._ignored, self._caches = frozenset(unread), dict.fromkeys(caches)
        self._opaque = {name: Packed({"is": "other", "class": "?", "needed": needed}, whole=False) for name in lost}

    def now(self) -> Snapshot:
        """Everything that is not as the constructor left it."""
        sharing, first = Sharing(), self._first
        self._last = _packed(self._model, self._held, self._made, self._last, self._places, sharing, self._ignored)
        found = {n: one for n, one in self._last.items() if one is not first.get(n) and not one.same(first.get(n))}
        found |= {name: ABSENT for name in first if name not in self._last}
        found |= self._opaque
        kept = {name: one for name, one in found.items() if not self._left_out(name, one)}
        return self._with_referred(kept, sharing.pairs) if sharing.pairs else kept

    def _with_referred(self, kept: Snapshot, pairs: Sequence[tuple[str, str]]) -> Snapshot:
        """The same with the places that others refer to, in the order in which they were packed."""
        for name, referred in reversed(pairs):
            if name in kept and referred not in kept:
                kept[referred] = self._last[referred]
            if name in kept and not kept[referred].whole:
                kept[name] = replace(kept[name], whole=False)
        return {name: kept[name] for name in dict.fromkeys((*self._last, *kept)) if name in kept}

    def _left_out(self, name: str, packed: Packed) -> bool:
        if isinstance(packed.tree, dict) and "table" in packed.tree:  # a state_dict has it, too
            return False
        if name in self._caches and self._caches[name] is None and packed is not ABSENT:
            self._caches[name] = packed
        cache = self._caches.get(name)
        return name in self._ignored or (cache is not None and packed.same(cache))

    def restore(self, snapshot: Snapshot) -> None:
        """The inverse of :meth:`now`, before the first call."""
        give_back(self._model, snapshot)
        self._caches = {name: one for name, one in self._caches.items() if name not in snapshot}

    def on_copy(self, snapshot: Snapshot) -> Snapshot:
        """What makes a copy of the model as it is now one as it was: places that have changed since are reset."""
        reset = {name: self._first.get(name, ABSENT) for name in self.now() if name not in snapshot}
        return reset | snapshot

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Afterwards the module keeps what it kept before."""
        before = self.now()
        try:
            yield
        finally:
            give_back(self._model, self.on_copy(before), strict=False)

    def lost(self, other: nn.Module, changing: Collection[str]) -> list[str]:
        """Places of now that could not be given back to ``other``, the same module before its first call.

        ``changing``: places that are known to change.
        """
        now = self.now()
        found = [name for name in changing if name not in now and not self._last.get(name, ABSENT).whole]
        return [*found, *_given_back(other, now)]


def alike(model: nn.Module, other: nn.Module, held: Collection[str], names: Collection[str]) -> list[str]:
    """Those of the places ``names`` in which two modules of one class keep the same."""
    mine, its = (_packed(one, held, _Everything(), {}) for one in (model, other))
    return [n for n in names if n in mine and not _refers_to_weights(mine[n].tree) and mine[n].near(its.get(n))]


def _refers_to_weights(tree: Any) -> bool:
    """Whether a part of it is a weight or in the memory of one, and so changes with it."""
    if isinstance(tree, dict):
        return tree.get("is") == "weight" or any(map(_refers_to_weights, tree.values()))
    return isinstance(tree, list) and any(map(_refers_to_weights, tree))


def _all_in(value: Any, places: Places) -> list[Any]:
    """A value and everything inside of it."""
    found: dict[int, Any] = {}
    left = [value]
    while left:
        one = left.pop()
        if type(one) in SCALARS or id(one) in found or (isinstance(one, nn.Module) and places.name_of(one) is not None):
            continue
        found[id(one)] = one
        left += [] if isinstance(one, Tensor) or is_given(one) else inside(one)
    return list(found.values())


class _Everything:
    def __contains__(self, one: object) -> bool:
        return True


def _packed(
    model: nn.Module,
    held: Collection[str],
    made: Container[int],
    former: Snapshot,
    places: Places | None = None,
    sharing: Sharing | None = None,
    unread: Container[str] = (),
) -> Snapshot:
    places = Places(model, held) if places is None else places
    refer = _references(places, Memory(model, held))
    pack = Packing(refer, made, Sharing() if sharing is None else sharing)
    found: Snapshot = {}
    for place in sorted(places, key=_depth):
        if place.name in unread and not place.kind:
            continue
        before = former.get(place.name)
        unchanged = before is not None and _is_unchanged(place, before.tree, made)
        found[place.name] = before if before is not None and unchanged else _pack_place(place, pack, before)
    return found


def _depth(place: Place) -> int:
    """Modules that calls have made are given back before what is in them."""
    return place.name.count(".")


def _is_unchanged(place: Place, tree: Any, made: Container[int]) -> bool:
    """Whether a value is certainly what it was, without a look inside: most attributes are numbers and empty tables."""
    value = place.table[place.key]
    if type(value) in SCALARS:
        return tree is value
    if type(value) not in EMPTY or value or type(tree) is not dict or tree.get("items", tree.get("pairs")) != []:
        return False
    if place.key.endswith("_hooks"):
        return True
    return tree["class"] == EMPTY[type(value)] and id(value) in made and "new" not in tree


def _pack_place(place: Place, pack: Packing, before: Packed | None) -> Packed:
    if place.of_hooks:
        return replace(pack, made=_Everything())(place.name, list(place.value.values()), before)
    if place.kind == SCRIPT:
        pack = replace(pack, made=_Everything())
    packed = pack(place.name, place.value, before)
    if place.kind and isinstance(packed.tree, dict):
        packed.tree["table"] = place.kind
    return packed


def _references(places: Places, memory: Memory) -> Reference:
    def refer(value: Any) -> dict[str, Any] | None:
        if isinstance(value, Tensor):
            return memory.reference(value)
        if isinstance(value, nn.Module):
            name = places.name_of(value)
            return None if name is None else {"is": "module", "name": name}
        return {"is": "given", "kind": type(value).__name__} if is_given(value) else None

    return refer


def give_back(model: nn.Module, snapshot: Mapping[str, Packed], strict: bool = True) -> None:
    """Put what was kept into ``model``; a :class:`SpecError` if it cannot be made again, unless not ``strict``."""
    failed = _given_back(model, snapshot)
    for name, why in failed.items() if strict else ():
        raise SpecError(
            f"model {type(model).__name__} keeps {name!r} between calls, which cannot be made again ({why}): "
            "keep it in a buffer, or make it in the constructor"
        )


def _given_back(model: nn.Module, snapshot: Mapping[str, Packed]) -> dict[str, str]:
    """Put what was kept into ``model``; gives the places that failed, with the reasons."""
    modules, memory = dict(model.named_modules()), Memory(model, None)
    failed: dict[str, str] = {}
    done: dict[str, Any] = {}

    def refer(tree: dict[str, Any]) -> Any:
        return modules[tree["name"]] if tree["is"] == "module" else memory.referred(tree)

    for name, packed in sorted(snapshot.items(), key=lambda one: one[0].count(".")):
        path, _, key = name.rpartition(".")
        try:
            module = model.get_submodule(path)
            table = _table_of(module, key, packed)
            shared = partial(_is_shared, memory, None if table is module.__dict__ else table.get(key))
            _put(table, key, packed, partial(unpack, packed, refer=refer, shared=shared, model=model, done=done))
            if table is not module.__dict__:  # a constructor may have set it to None, which would hide it
                module.__dict__.pop(key, None)
        except (CannotUnpack, AttributeError) as error:
            failed[name] = str(error)
    return failed


def _is_shared(memory: Memory, place: Any, tensor: Tensor) -> bool:
    """Whether a tensor is a weight or in the memory of one, and not the one that is to be filled."""
    return tensor is not place and memory.reference(tensor) is not None


def _put(table: dict[str, Any], key: str, packed: Packed, make: Callable[[Any], Any]) -> None:
    if packed.tree == ABSENT.tree:
        table.pop(key, None)
    elif key.endswith("_hooks") and isinstance(table.get(key), dict):
        hooks = list(table[key].values())
        if [id(one) for one in make(list(hooks))] != list(map(id, hooks)):
            raise CannotUnpack("other hooks than there are now")
    else:
        table[key] = make(table.get(key))


def _table_of(module: nn.Module, key: str, packed: Packed) -> Any:
    """Where an attribute, a parameter, a buffer or a submodule of that name is or belongs."""
    if isinstance(module, torch.jit.ScriptModule):
        return Scripted(module)
    for table in (module._parameters, module._buffers, module._modules):
        if key in table:
            return table
    tree = packed.tree if isinstance(packed.tree, dict) else {}
    return getattr(module, tree["table"]) if "table" in tree else module.__dict__


# ---- KeptReads: notice which tensors of earlier calls a call of a user's module reads, and which it writes unseen.
#
# Whether a number depends on what a module keeps may not show in a first step: a teacher may begin as a copy of its
# student. That its memory is read does.

WHOLE = frozenset((Tensor.zero_, Tensor.fill_, Tensor.copy_))  # what was there before does not matter
LOOKS = frozenset(("size", "dim", "stride", "numel", "element_size", "is_floating_point", "is_complex", "detach"))
VIEWS = (*DATA[:1], *(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")))
TO_PYTHON = frozenset(("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"))


class KeptReads(TorchFunctionMode):
    """Around one call: :attr:`names` of places whose tensors it reads, ``kept`` being those of before the call.

    ``ours``: tensors whose memory is not meant, such as weights and what the call is given. :attr:`written`: places
    whose memory it reaches by ``.data``; :attr:`branches`: whether it reads numbers into Python, and so may do
    something else in a later call.
    """

    def __init__(self, kept: Sequence[tuple[str, Tensor, int]], ours: Iterable[Tensor]) -> None:
        super().__init__()
        ours = list(ours)
        not_meant = {storage(one) for one in ours} | {-id(one) for one in ours}
        self._alive = [one for _, one, _ in kept]  # so that no other tensor gets their memory
        self._places = {key: name for name, one, _ in kept for key in _keys(one) if key not in not_meant}
        self.names: set[str] = set()
        self.written: set[str] = set()
        self.branches = False

    def __enter__(self) -> Self:
        """Watch."""
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.branches = self.branches or name in TO_PYTHON
        if self._places and name != "__set__" and name not in LOOKS:
            self._note(func, name, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, name: str, args: Any, kwargs: Any) -> None:
        found = [place for one in _tensors((*args, *kwargs.values())) for place in self._found(one)]
        if func in DATA:
            self.written.update(found)
        if not found or (name == "__get__" and func not in VIEWS):
            return
        changed = self._found(args[0]) if args and isinstance(args[0], Tensor) and _writes(name) else []
        if changed and _overwrites(func, name, args):
            for key in _keys(args[0]):
                self._places.pop(key, None)
        self.names.update(place for place in found if place not in changed)

    def _found(self, tensor: Tensor) -> list[str]:
        return list({self._places[key] for key in _keys(tensor) if key in self._places}) if self._places else []


def _keys(tensor: Tensor) -> tuple[int, ...]:
    """The memory of a tensor, and itself: sparse ones have no such memory, views of weights that of others."""
    place = storage(tensor)
    return (place, -id(tensor)) if place else (-id(tensor),)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for one in values:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _tensors(one)


def _writes(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name in IN_PLACE


IN_PLACE = frozenset(f"__{name}__" for name in ("iadd", "isub", "imul", "itruediv", "iand", "ior", "ixor", "ipow"))


def _overwrites(func: Any, name: str, args: Any) -> bool:
    """Whether nothing is left of what the tensor held."""
    if not storage(args[0]):
        return False
    with DisableTorchFunction():
        whole = args[0].untyped_storage().nbytes() == args[0].numel() * args[0].element_size()
    everything = name == "__setitem__" and (args[1] is Ellipsis or args[1] == slice(None))
    return whole and (func in WHOLE or everything)


# ---- What a user's module keeps in Python between calls, as tensors of a file: a text of JSON, and tensors as they
# are.
#
# Buffers are part of the training state anyway. This is for modules that count in an attribute, keep a tensor of the
# last
# call, change a frozen parameter, or draw from Python's or NumPy's generator. Nothing is pickled.

TEXT, TENSOR = "python", "python."  # names in a file


def as_tensors(snapshot: Snapshot, more: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
    """What a module keeps, for a file; empty if it keeps nothing and there is no ``more`` to say."""
    whole = {name: packed for name, packed in snapshot.items() if packed.whole}
    lost = [name for name in snapshot if name not in whole]
    if not snapshot and not more:
        return {}
    found = {f"{TENSOR}{n}.{at}": one.cpu().clone() for n, p in whole.items() for at, one in enumerate(p.tensors)}
    trees = {name: one.tree for name, one in whole.items()}
    needed = [name for name in lost if snapshot[name].tree.get("needed")]
    text = json.dumps({"attributes": trees, "lost": lost, "needed": needed, **(more or {})})
    return {TEXT: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), **found}


def from_tensors(saved: Mapping[str, Tensor]) -> Snapshot:
    """The inverse of :func:`as_tensors`."""
    trees = _text(saved).get("attributes", {})
    found = {name: Packed(tree, _tensors_of(name, saved)) for name, tree in trees.items()}
    plain = [name for name in saved if name.startswith(TENSOR) and name not in _named(found)]
    return found | {name.removeprefix(TENSOR): as_kept(saved[name]) for name in plain}  # as files had them before


def _named(found: Snapshot) -> set[str]:
    return {f"{TENSOR}{name}.{at}" for name, packed in found.items() for at in range(len(packed.tensors))}


def as_kept(value: Tensor) -> Packed:
    """A tensor that takes the place of another one, or of None."""
    about = {"parameter": False, "grad": False, "host": False}
    return Packed({"is": "tensor", "at": 0, **about}, (value.detach().clone(),))


def _tensors_of(name: str, saved: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    found = []
    while f"{TENSOR}{name}.{len(found)}" in saved:
        found.append(saved[f"{TENSOR}{name}.{len(found)}"])
    return tuple(found)


def _text(saved: Mapping[str, Tensor]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(saved[TEXT].tolist())) if TEXT in saved else {}
    return found


def saved_state(snapshot: Snapshot) -> dict[str, Tensor]:
    """What a module keeps and the states of both generators, for a checkpoint."""
    kind, keys, *rest = np.random.get_state()
    drawn = {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest]}
    return as_tensors(snapshot, {"generators": drawn})


def check_whole(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """A :class:`SpecError` if something could not be saved."""
    lost = _text(saved).get("lost")
    if lost:
        raise SpecError(
            f"model {type(model).__name__} keeps {lost[0]!r} between calls, which a checkpoint cannot hold, "
            "so its training cannot be resumed; make it a buffer, or start afresh with overwrite"
        )


def check_enough(label: str, model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """A :class:`SpecError` if evaluations read something that could not be saved."""
    needed = _text(saved).get("needed")
    if needed:
        raise SpecError(
            f"task {label!r}: model {type(model).__name__} keeps {needed[0]!r} between calls, which no file can hold, "
            "and its predictions depend on it: predict in the process that trained it, or keep it in a buffer"
        )


def restore_generators(saved: Mapping[str, Tensor]) -> None:
    """Continue Python's and NumPy's generators as :func:`saved_state` found them."""
    drawn = _text(saved).get("generators")
    if drawn is None:
        return
    version, state, gauss = drawn["python"]
    random.setstate((version, tuple(state), gauss))
    kind, keys, *rest = drawn["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


def restore_attributes(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Give ``model`` what a file has of what it kept."""
    give_back(model, from_tensors(saved))
