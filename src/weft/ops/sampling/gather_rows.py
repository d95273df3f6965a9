"""Gather rows of a feature matrix by node id: on the device, from pinned host memory, or on the CPU.

Shapes: N rows, F features, M ids.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.ops.cpu.calls import run_shares

BYTES_OF_A_SHARE = 1 << 18


@cache
def _kernels() -> ModuleType:
    from weft.ops.sampling import cpu_kernels as gather

    return gather


def gather_rows_torch(x: Tensor, ids: Tensor) -> Tensor:
    """``x[ids]``: the rows ``[M, F]`` of ``x [N, F]``."""
    return x[ids.long()]


def check_gather(x: Tensor, out: Tensor | None, count: int) -> None:
    """Raise an InputError if ``x`` is not a matrix with contiguous rows, or ``out`` does not fit."""
    if x.dim() != 2 or (x.shape[1] > 1 and x.stride(1) != 1):
        raise InputError(f"rows are gathered from a matrix with contiguous rows, not {list(x.shape)} {x.stride()}")
    if out is not None and (out.shape != (count, x.shape[1]) or out.dtype != x.dtype or not out.is_contiguous()):
        raise InputError(f"out must be contiguous {x.dtype} [{count}, {x.shape[1]}], not {out.dtype} {list(out.shape)}")


def gather_rows_cpu(x: Tensor, ids: Tensor, out: Tensor | None = None, shares: int | None = None) -> Tensor:
    """The rows ``ids [M]`` (int32 or int64) of ``x [N, F]`` on the CPU, on as many threads as torch uses.

    ``x`` may be a mapped file, ``out`` pinned memory. Ids are not checked. ``shares=1`` stays in the calling thread.
    """
    check_gather(x, out, ids.numel())
    out = x.new_empty(ids.numel(), x.shape[1]) if out is None else out
    ids, size = ids.contiguous(), x.element_size()
    row_bytes = x.shape[1] * size
    if out.numel():
        like = torch.empty(1, dtype=ids.dtype).numpy()
        shares = shares or max(1, min(64, out.numel() * size // BYTES_OF_A_SHARE))
        given = (out.data_ptr(), x.data_ptr(), row_bytes, x.stride(0) * size, ids.data_ptr(), like, ids.numel())
        run_shares(_kernels().gather_share, given, shares)
    return out


def absent_cpu(ids: Tensor, held: Tensor, places: Tensor) -> Tensor:
    """Those of ``ids [M]`` int32 that ``held [N]`` bool says no to ``[R]``; where they are goes to ``places`` int32."""
    found = torch.empty_like(ids)
    addresses = (held.data_ptr(), places.data_ptr(), found.data_ptr())
    return found[: _kernels().absent(ids.data_ptr(), ids.numel(), *addresses)]
