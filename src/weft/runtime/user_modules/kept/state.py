"""KeptState: what a user's module keeps in Python beside its training state, as it is now, and given back later."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.errors import SpecError
from weft.runtime.user_modules.kept.packing import SCALARS, Packed, Packing, Reference
from weft.runtime.user_modules.kept.shared_memory import Memory
from weft.runtime.user_modules.kept.sharing import Sharing
from weft.runtime.user_modules.kept.unpacking import CannotUnpack, unpack
from weft.runtime.user_modules.kept.walking import SCRIPT, Place, Places, Scripted, inside, is_given

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
