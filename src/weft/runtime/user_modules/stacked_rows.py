"""StackedRows: fetch and sum rows by shared positions at the speed of one task, in stacks of users' modules on a CPU.

A user's module says ``x[src]``, ``x.index_select(0, src)`` and ``out.scatter_add_(0, dst, messages)``, as PyG's
do. Under ``vmap`` torch turns them into a gather and a scatter of single numbers (T = 4, 32,517 edges, 32 features, one
thread: 14.8 and 14.2 ms, against 0.6 and 0.8 ms per task alone). All tasks use the same positions, so here they are
rows of one long matrix, fetched and added as rows.

Shapes: T tasks, N rows, E positions, F features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from weft.runtime.user_modules.transforms import PLAIN, has_forward_derivatives, saved_tensors_are_hooked, vmap_sizes

FETCHES = frozenset((torch.index_select, Tensor.index_select))
POSITIONS = (torch.int64, torch.int32)


class StackedRows(TorchFunctionMode):
    """Inside, rows of ``x [N, ...]`` that differ by task are fetched and added up by positions that do not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FETCHES and len(args) == 3 and not kwargs and _along_rows(*args[:2]) and _serves(args[0], args[2]):
            return FetchRows.apply(args[0], args[2])
        if func is Tensor.__getitem__ and _serves(*args):
            return FetchRows.apply(*args)
        if func is Tensor.scatter_add_ and len(args) == 4 and not kwargs:
            index = _shared_index(*args)
            if index is not None:
                return args[0].add_(AddRows.apply(args[3], index, args[0].shape[0]))
        return func(*args, **kwargs)


class FetchRows(torch.autograd.Function):
    """``x [N, ...]`` and positions ``[E]`` to ``[E, ...]``."""

    @staticmethod
    def forward(x: Tensor, index: Tensor) -> Tensor:
        return x.index_select(0, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, index = inputs
        ctx.save_for_backward(index)
        ctx.rows = x.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return AddRows.apply(grad, index, ctx.rows), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, index: Tensor) -> tuple[Tensor, int]:
        """``x [T, N, ...]`` as ``[T N, ...]``, with the positions of every task."""
        x, tasks = x.movedim(in_dims[0], 0), info.batch_size
        found = x.flatten(0, 1).index_select(0, _places(index, x.shape[1], tasks))
        return found.unflatten(0, (tasks, index.numel())), 0


class AddRows(torch.autograd.Function):
    """Sum of the rows ``[E, ...]`` at every position: ``[N, ...]``."""

    @staticmethod
    def forward(rows: Tensor, index: Tensor, count: int) -> Tensor:
        return rows.new_zeros(count, *rows.shape[1:]).index_add_(0, index, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return FetchRows.apply(grad, index), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, rows: Tensor, index: Tensor, count: int) -> tuple[Tensor, int]:
        """The rows of all tasks, added into ``[T N, ...]``."""
        rows, tasks = rows.movedim(in_dims[0], 0), info.batch_size
        places = _places(index, count, tasks)
        total = rows.new_zeros(tasks * count, *rows.shape[2:]).index_add(0, places, rows.flatten(0, 1))
        return total.unflatten(0, (tasks, count)), 0


def _places(index: Tensor, rows: int, tasks: int) -> Tensor:
    """Positions ``[E]`` as those of every task in ``[T N]`` rows: ``[T E]``."""
    first = torch.arange(0, rows * tasks, rows, device=index.device, dtype=index.dtype) if rows else index[:0]
    return (first[:, None] + index).flatten()


def _along_rows(x: Any, dim: Any) -> bool:
    return isinstance(x, Tensor) and isinstance(dim, int) and x.dim() > 0 and dim in (0, -x.dim())


def _serves(x: Any, index: Any, *others: Any) -> bool:
    """Whether ``x`` is one tensor per task of a single ``vmap``, and ``index`` a list of positions for all of them."""
    if others or type(x) not in PLAIN or type(index) not in PLAIN or x.dim() == 0 or 0 in x.shape:
        return False
    if index.dim() != 1 or index.dtype not in POSITIONS or index.numel() == 0 or vmap_sizes(index) != {}:
        return False
    batches = vmap_sizes(x)
    return batches is not None and len(batches) == 1 and not _watched()


def _shared_index(out: Any, dim: Any, index: Any, rows: Any) -> Tensor | None:
    """The positions ``[E]`` of a scatter whose index was expanded from them; None if it is another scatter."""
    if not _along_rows(out, dim) or not isinstance(index, Tensor) or not isinstance(rows, Tensor):
        return None
    if index.dim() == 0 or index.shape != rows.shape or out.shape[1:] != rows.shape[1:] or out.dtype != rows.dtype:
        return None
    if vmap_sizes(index) != {} or any(index.stride()[1:]) or not vmap_sizes(out):
        return None
    first = index[(slice(None), *(0,) * (index.dim() - 1))]
    return first if _serves(rows, first) else None


def _watched() -> bool:
    return torch.compiler.is_compiling() or has_forward_derivatives() or saved_tensors_are_hooked()
