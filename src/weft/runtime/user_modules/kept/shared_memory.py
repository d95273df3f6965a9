"""Memory that a module's tensors share with its weights and buffers.

Training keeps weights and buffers in places of its own. In a plain loop a view of a weight (``layer.weight.detach()``)
follows every update; here it does if it is made a view of the new place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction

from weft.runtime.user_modules.kept.walking import Places, tensors_in


class Memory:
    """Where the parameters and buffers of ``model`` are, those that are ``held`` by the training state (None: all)."""

    def __init__(self, model: nn.Module, held: Collection[str] | None) -> None:
        self._model, self._held = model, held

    @cached_property
    def _named(self) -> dict[str, Tensor]:
        found = (*self._model.named_parameters(), *self._model.named_buffers())
        return {name: one for name, one in found if self._held is None or name in self._held}

    @cached_property
    def _ids(self) -> dict[int, str]:
        return {id(one): name for name, one in self._named.items()}

    @cached_property
    def _by_storage(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for name, one in self._named.items():
            start = storage(one)
            if start:
                found.setdefault(start, []).append(name)
        return found

    def reference(self, tensor: Tensor) -> dict[str, Any] | None:
        """A tensor as one of the weights, or as a view of one; None if it has memory of its own."""
        if id(tensor) in self._ids:
            return {"is": "weight", "name": self._ids[id(tensor)]}
        owner = self.owner(tensor)
        if owner is None or isinstance(tensor, nn.Parameter):
            return None
        start = tensor.storage_offset() - self._named[owner].storage_offset()
        return {"is": "weight", "name": owner, "view": [list(tensor.shape), list(tensor.stride()), start]}

    def owner(self, tensor: Tensor) -> str | None:
        """The name of a weight that the memory of ``tensor`` is part of."""
        for name in self._by_storage.get(storage(tensor), ()):
            own = self._named[name]
            if own is not tensor and own.dtype == tensor.dtype and overlap(own, tensor):
                return name
        return None

    def referred(self, tree: dict[str, Any]) -> Tensor:
        """The inverse of :meth:`reference`."""
        own = self._named[tree["name"]]
        if "view" not in tree:
            return own
        shape, stride, start = tree["view"]
        return own.detach().as_strided(shape, stride, own.storage_offset() + start)


def storage(tensor: Tensor) -> int:
    """Where the memory of a tensor begins; 0 for those without such a place, as sparse ones."""
    try:
        with DisableTorchFunction():
            return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse ones, and those inside of torch's transforms
        return 0


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage reach the same part of it."""
    (first, end), (start, last) = _range(one), _range(other)
    return first < last and start < end


def _range(tensor: Tensor) -> tuple[int, int]:
    """First and last byte of a tensor's numbers in its storage."""
    size = tensor.element_size()
    reach = sum((length - 1) * abs(step) for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.storage_offset() * size
    return first, first if tensor.numel() == 0 else first + (reach + 1) * size


def shared_weights(model: nn.Module) -> tuple[str, str] | None:
    """Names of a trained parameter and of another parameter or buffer that is in the same memory; None if none is."""
    trained = Memory(model, [name for name, p in model.named_parameters() if p.requires_grad])
    others = ((n, t) for n, t in (*model.named_parameters(), *model.named_buffers()) if not is_meta(t))
    found = ((owner, name) for name, one in others if (owner := trained.owner(one)) is not None)
    return next(found, None)


def is_meta(tensor: Tensor) -> bool:
    """Whether it has no memory: of a dry run, or not initialised yet."""
    return tensor.is_meta or nn.parameter.is_lazy(tensor)


@dataclass(frozen=True)
class Follower:
    """A tensor that a module keeps under ``name``, in the memory of its weight or buffer ``owner``."""

    name: str
    owner: str
    tensor: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    def follow(self, owner: Tensor) -> None:
        """Be in the same part of the memory of ``owner``, where that is now."""
        with torch.no_grad():
            place = owner.detach().as_strided(self.shape, self.stride, owner.storage_offset() + self.start)
            self.tensor.data = place

    def leave(self) -> None:
        """Have memory of its own: the module has given its owner another one."""
        self.tensor.data = self.tensor.data.clone()


def followers(model: nn.Module, held: Collection[str]) -> list[Follower]:
    """What a module keeps in the memory of the weights and buffers that the training state holds."""
    memory, registered = Memory(model, held), {id(p) for p in model.parameters() if p.requires_grad}
    return [
        Follower(name, owner, one, tuple(one.shape), tuple(one.stride()), _start(one, model, owner))
        for name, one in _kept(model, held)
        if id(one) not in registered and (owner := _owner(memory, one)) is not None
    ]


def _owner(memory: Memory, tensor: Tensor) -> str | None:
    found = memory.reference(tensor)
    return memory.owner(tensor) if found is None else str(found["name"])


def _start(tensor: Tensor, model: nn.Module, owner: str) -> int:
    path, _, key = owner.rpartition(".")
    module = model.get_submodule(path)
    own = module._parameters[key] if key in module._parameters else module._buffers[key]
    assert own is not None
    return tensor.storage_offset() - own.storage_offset()


def _kept(model: nn.Module, held: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    known = {id(one) for one in model.modules()}
    for place in Places(model, held):
        if place.kind == "_buffers":  # another name of one, or made by a call
            continue
        yield from ((place.name, one) for one in tensors_in(place.value, known) if one.layout is torch.strided)
