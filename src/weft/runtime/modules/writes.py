"""Memory that a module's tensors share with its weights and buffers.

Training keeps weights and buffers in places of its own. In a plain loop a view of a weight (``layer.weight.detach()``)
follows every update; here it does if it is made a view of the new place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode

from weft.nn.pyg.edges import is_bypass
from weft.runtime.modules.walking import Places, tensors_in


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
        name = self._ids.get(id(tensor))
        if name is not None and isinstance(tensor, nn.Parameter):
            return {"is": "weight", "name": name}
        owner = self.owner(tensor) if name is None else name  # a buffer is another object in training
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


def shared_buffers(model: nn.Module) -> list[tuple[str, str]]:
    """Names of buffers that are in the memory of other ones."""
    buffers = dict(model.named_buffers())
    memory = Memory(model, buffers)
    return [(owner, name) for name, one in buffers.items() if (owner := memory.owner(one)) is not None]


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


# ---- Sharing: values and memory that a module keeps in several places, so that they are one again when they come
# back.


class Written(NamedTuple):
    """A value that is packed: the ``place`` it is in, as which ``tree``, and the ``label`` that others refer to."""

    place: str
    label: str
    tree: dict[str, Any]
    value: Any  # ids are unique among what lives


class Sharing:
    """What is packed so far of one module.

    ``pairs``: places with the earlier ones that they refer to, which must come back with them, and before them.
    """

    def __init__(self) -> None:
        self._values: dict[int, Written] = {}
        self._memory: dict[int, Written] = {}
        self.pairs: list[tuple[str, str]] = []

    def add(self, written: Written) -> None:
        """A value that a call has made."""
        self._values[id(written.value)] = written

    def find(self, value: Any, place: str) -> Written | None:
        """The same value in an earlier place, if there is one."""
        found = self._values.get(id(value))
        if found is not None:
            self.pairs.append((place, found.place))
        return found

    def share_memory(self, written: Written) -> None:
        """Note in the trees of two tensors that they are in one memory, with their parts of it."""
        tensor, start = written.value, storage(written.value)
        if not start or any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
            return
        first = self._memory.setdefault(start, written)
        if first.value is tensor or first.value.dtype != tensor.dtype:
            return
        for one in (first, written):
            one.tree["memory"] = {"label": first.label, **_part(one.value)}
        if first.place != written.place:
            self.pairs.append((written.place, first.place))


def _part(tensor: Tensor) -> dict[str, Any]:
    numbers = tensor.untyped_storage().nbytes() // tensor.element_size()
    return {"numbers": numbers, "view": [list(tensor.shape), list(tensor.stride()), tensor.storage_offset()]}


# ---- InputWrites: notice that a user's module changes in place what it is given, such as ``edge_index``.
#
# A batch is given to a module again and again, in trials too, and several members share it: a plain loop would go on
# from
# what the last call left, and no run can do that.


class InputWrites(TorchFunctionMode):
    """Around calls of a module that is ``given`` these tensors by name; :meth:`changed` then names those it changed.

    Torch counts what changes a tensor in place, but not through ``.data`` or NumPy: a tensor that is reached that way
    is copied first, and compared.
    """

    def __init__(self, given: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._given = dict(given)
        self._copies: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {name: tensor._version for name, tensor in given.items()}

    def __enter__(self) -> Self:
        """Watch."""
        super().__enter__()
        return self

    def changed(self) -> list[str]:
        """The names of what was changed."""
        counted = {name for name, tensor in self._given.items() if tensor._version != self._versions[name]}
        unequal = {name for name, before in self._copies.items() if not same_numbers(self._given[name], before)}
        return sorted(counted | unequal)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_bypass(func):
            for name, tensor in self._given.items():
                if name not in self._copies and one_memory(args[0], tensor):
                    self._copies[name] = tensor.clone()
        return func(*args, **(kwargs or {}))


def one_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are, or are views of, the same memory."""
    if one is other:
        return True
    try:
        with DisableTorchFunction():  # others watch who reaches a tensor's memory, and this is not the module
            return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0
    except (NotImplementedError, RuntimeError):  # sparse ones, and those inside of torch's transforms
        return False


def same_numbers(now: Tensor, before: Tensor) -> bool:
    """Whether all numbers are equal, NaNs to each other."""
    if now.shape != before.shape or now.dtype != before.dtype or now.device != before.device:
        return False
    return torch.equal(now, before) or bool(((now == before) | ((now != now) & (before != before))).all())


# ---- WeightWrites: notice that a user's module changes its own weights in a step, whether or not a number differs.
#
# A constraint such as ``weight.clamp_(-5, 5)`` or ``max_norm`` may change nothing at the first call and much at the
# thousandth, and so may a hook in the backward pass. Only a module that owns its parameters keeps such a change; a
# stack
# and cast weights are copies. Autograd's threads have the modes of the thread that calls it, so hooks on a GPU are
# seen.

DATA = (Tensor.data.__get__, Tensor.data.__set__)
GRADIENT = Tensor.grad.__get__


class WeightWrites(TorchFunctionMode):
    """Around a call or a backward pass, :attr:`seen` becomes true if it writes to a weight or touches its ``.data``.

    Memory that is reached otherwise, as by NumPy, may only be read: it is copied first, and compared.
    :attr:`reads_gradient`: whether it looks at the ``.grad`` of a weight.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.seen = self.reads_gradient = False
        self._tables = [module._parameters for module in model.modules()]
        self._before: list[tuple[Tensor, int]] = []
        self._copies: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> Self:
        """Start watching the weights that the model has now."""
        weights = [tensor for table in self._tables for tensor in table.values() if tensor is not None]
        self._before = [(tensor, tensor._version) for tensor in weights]
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop watching."""
        super().__exit__(*error)
        self.seen = self.seen or any(tensor._version != version for tensor, version in self._before)
        self.seen = self.seen or any(not same_numbers(tensor, before) for tensor, before in self._copies)
        self._before, self._copies = [], []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_bypass(func):
            reached = [tensor for tensor, _ in self._before if one_memory(args[0], tensor)]
            self.seen = self.seen or (func in DATA and bool(reached))
            self._copies += [(tensor.detach(), tensor.detach().clone()) for tensor in reached]
        elif func == GRADIENT:
            self.reads_gradient = self.reads_gradient or any(args[0] is tensor for tensor, _ in self._before)
        return func(*args, **(kwargs or {}))
