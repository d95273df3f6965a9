"""InputWrites: notice that a user's module changes in place what it is given, such as ``edge_index``.

A batch is given to a module again and again, in trials too, and several members share it: a plain loop would go on from
what the last call left, and no run can do that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode

from weft.nn.pyg.edges import is_bypass


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
