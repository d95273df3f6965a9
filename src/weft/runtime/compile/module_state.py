"""Detect module state that tracing would freeze: whatever a module keeps between calls besides its buffers.

A buffer is a tensor in a fixed place, which a traced step reads and writes as the module does. But a Python number, a
tensor that is replaced by another one, and a value read back to the host become constants of the trace.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from weft.capture.schemas import HOST_READS
from weft.core.errors import InputError
from weft.runtime.compile.fold_constants import attributes_read, attributes_written, place_of

NUMBERS = (bool, int, float, complex, str)
READ_WHOLE = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
SET_BY_RUNNERS = ("training",)


class HostReads(TorchDispatchMode):
    """Inside, ``asked`` collects the tensors from which a number is read back to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in HOST_READS:
            self.asked += [value for value in args if isinstance(value, Tensor)]
        return func(*args, **(kwargs or {}))


class ForbidHostReads(TorchFunctionMode):
    """Inside, ``tolist()`` and ``numpy()`` raise: they read data back without an operator that a trace could see."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READ_WHOLE:
            raise InputError("it reads numbers back from its data")
        return func(*args, **(kwargs or {}))


class ModuleStateCheck:
    """What ``model`` and Python's generators hold now, to be compared with what they hold after a call."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {(name, key): value for name, key, value in _attributes(model)}
        self._drawn = _generators()

    def check(self, traced: GraphModule, asked: Iterable[Tensor], changing: Iterable[Tensor]) -> None:
        """:class:`InputError` if a ``traced`` call depends on state that it changed itself.

        ``asked``: tensors from which the call reads a number back; ``changing``: those that training changes.
        """
        if _generators() != self._drawn:
            raise InputError("it draws from Python's or NumPy's generator, and a compiled step would repeat one draw")
        read = {place_of(tensor) for tensor in attributes_read(traced)}
        for name, key, value in _attributes(self._model):
            old = self._before.get((name, key))
            same = old is value or (type(old) is type(value) and isinstance(old, NUMBERS) and _equal(old, value))
            if not same and (isinstance(old, NUMBERS) or (isinstance(old, Tensor) and place_of(old) in read)):
                where = f"{name}.{key}" if name else key
                raise InputError(
                    f"it changes {where!r} from call to call, which is no buffer: compiling would freeze it"
                )
        moving = {place_of(tensor) for tensor in (*changing, *attributes_written(traced))}
        if any(place_of(tensor) in moving for tensor in asked):
            raise InputError("it branches on numbers that change in training, and a compiled step would branch once")


def _attributes(model: nn.Module) -> list[tuple[str, str, Any]]:
    """Path of a module, name and value of everything that is no parameter, buffer or module."""
    found = ((path, key, value) for path, module in model.named_modules() for key, value in vars(module).items())
    return [one for one in found if one[1] not in SET_BY_RUNNERS]


def _equal(old: Any, new: Any) -> bool:
    return bool(old == new) or (old != old and new != new)


def _generators() -> tuple[Any, ...]:
    """The states of the generators of Python and NumPy."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), kind, keys.tobytes(), *rest
