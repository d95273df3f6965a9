"""What the calls of CPU kernels share: when they serve, and how tensors become addresses."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from weft.ops.csr.packed import PackedCSR

COMPILED = (torch.float32, torch.float64)
NO_DROPOUT = (0, 0, 0, 0, 0)


def serves(*tensors: Tensor | None) -> bool:
    """Whether the compiled kernels take these tensors: all of one type, float32 or float64."""
    dtype = tensors[0].dtype
    return dtype in COMPILED and all(tensor is None or tensor.dtype == dtype for tensor in tensors)


@cache
def kernels_of() -> ModuleType:
    """The compiled kernels; the first call imports numba."""
    from weft.ops.cpu import kernels

    return kernels


@cache
def like(dtype: torch.dtype) -> np.ndarray:
    """An array from which a kernel takes the type behind an address."""
    return torch.empty(1, dtype=dtype).numpy()


@cache
def one_of(dtype: torch.dtype) -> Tensor:
    """The factor of all edges if no factors are given."""
    return torch.ones(1, dtype=dtype)


def factors(values: Tensor | None, x: Tensor) -> tuple[Tensor, int]:
    """``(factors, step)``: a step of 0 stands for one number for all."""
    if values is None:
        return one_of(x.dtype), 0
    return (values if values.dtype == x.dtype else values.to(x.dtype)).contiguous(), 1


def order_of(back: PackedCSR) -> Tensor:
    """Where each edge of a transpose stands in the original order, in the type of its offsets."""
    assert back.perm.numel() == back.num_edges, "this transpose was packed without its perm"
    return back.perm.to(back.indptr.dtype)


class Dropout:
    """The dropout of a group of tasks: what kernels take, and the tensors behind their addresses."""

    def __init__(self, rate: Tensor | None, clock: Tensor | None, site: int, lead: torch.Size) -> None:
        self.active, self.arguments = rate is not None, NO_DROPOUT
        if rate is None:
            return
        rate = rate.to(torch.float32)
        self.rate = rate.expand(lead).contiguous() if rate.dim() else rate
        self.clock = (clock.expand(*lead, 2) if clock.dim() > 1 else clock).contiguous()
        steps = min(self.rate.dim(), 1), 2 * min(clock.dim() - 1, 1)
        self.arguments = (self.rate.data_ptr(), steps[0], self.clock.data_ptr(), steps[1], site)
