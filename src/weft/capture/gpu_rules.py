"""Make the dry run on meta tensors follow torch's CUDA code paths where they differ.

Two are known to matter. Dropout on a GPU is one kernel that saves a mask of one byte per element; elsewhere the mask
has the input's type. And a gather by 32-bit positions first copies them to 64 bits.
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
    """Redirects functions that have a CUDA code path of their own to it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is dropout:
            return _dropout(*args, **(kwargs or {}))
        if func is Tensor.__getitem__ and not args[0].requires_grad:  # autograd would save the 32-bit positions
            return args[0][_wide(args[1])]
        return func(*args, **(kwargs or {}))


def _wide(index: Any) -> Any:
    return index.long() if isinstance(index, Tensor) and index.dtype == torch.int32 else index


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    # torch.utils.checkpoint recomputes outside of this mode, and compares what is saved.
    repeated = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    if training and not inplace and 0.0 < p < 1.0 and not repeated:
        return torch.native_dropout(input, p, True)[0]
    return dropout(input, p, training, inplace)


@contextmanager
def gpu_rules(yes: bool) -> Iterator[None]:
    """Inside, if ``yes``, torch's functions take their CUDA code paths."""
    if not yes:
        yield
        return
    with GpuRules():
        yield
