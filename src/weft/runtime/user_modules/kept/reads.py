"""KeptReads: notice which tensors of earlier calls a call of a user's module reads, and which it writes unseen.

Whether a number depends on what a module keeps may not show in a first step: a teacher may begin as a copy of its
student. That its memory is read does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

from torch import Tensor
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode

from weft.runtime.user_modules.kept.shared_memory import storage
from weft.runtime.user_modules.weight_writes import DATA

WHOLE = frozenset((Tensor.zero_, Tensor.fill_, Tensor.copy_))  # what was there before does not matter
LOOKS = frozenset(("size", "dim", "stride", "numel", "element_size", "is_floating_point", "is_complex", "detach"))
TO_PYTHON = frozenset(("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"))


class KeptReads(TorchFunctionMode):
    """Around one call: :attr:`names` of places whose tensors it reads, ``kept`` being those of before the call.

    ``ours``: tensors whose memory is not meant, such as weights and what the call is given. :attr:`written`: places
    whose memory it reaches by ``.data``; :attr:`branches`: whether it reads numbers into Python, and so may do
    something else in a later call.
    """

    def __init__(self, kept: Sequence[tuple[str, Tensor, int]], ours: Iterable[Tensor]) -> None:
        super().__init__()
        not_meant = {storage(one) for one in ours}
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
        if name == "__get__" or not found:
            return
        changed = self._found(args[0]) if args and isinstance(args[0], Tensor) and _writes(name) else []
        if changed and _overwrites(func, name, args):
            for key in _keys(args[0]):
                self._places.pop(key, None)
        self.names.update(place for place in found if place not in changed)

    def _found(self, tensor: Tensor) -> list[str]:
        return list({self._places[key] for key in _keys(tensor) if key in self._places}) if self._places else []


def _keys(tensor: Tensor) -> tuple[int, ...]:
    """The memory of a tensor; a sparse one is told by itself."""
    place = storage(tensor)
    return (place,) if place else (-id(tensor),)


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
