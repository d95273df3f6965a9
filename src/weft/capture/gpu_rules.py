"""Where torch itself takes another way on a GPU than on tensors without data, this takes the GPU's way.

Two are known to matter. Dropout is one kernel on a GPU that keeps a mask of one byte an element; elsewhere it keeps a
mask of the input's own type. And what is fetched by 32-bit positions is fetched by a copy of them in 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout
from torch.overrides import TorchFunctionMode


class GpuRules(TorchFunctionMode):
    """Calls of functions that have a way of their own on a GPU take it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is dropout:
            return _dropout(*args, **(kwargs or {}))
        if func is Tensor.__getitem__ and not args[0].requires_grad:  # autograd would keep the positions as they are
            return args[0][_wide(args[1])]
        return func(*args, **(kwargs or {}))


def _wide(index: Any) -> Any:
    return index.long() if isinstance(index, Tensor) and index.dtype == torch.int32 else index


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    # What torch.utils.checkpoint repeats is repeated outside of here, and compared.
    repeated = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    if training and not inplace and 0.0 < p < 1.0 and not repeated:
        return torch.native_dropout(input, p, True)[0]
    return dropout(input, p, training, inplace)


@contextmanager
def gpu_rules(yes: bool) -> Iterator[None]:
    """Inside, where ``yes``, torch's functions do what they do on a GPU."""
    if not yes:
        yield
        return
    with GpuRules():
        yield
