"""Rules that Weft's operators share when they register with torch: batching over tasks, fake results, dropout rates."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import InputError


def lead_task(value: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """Bring the batch dimension of a tensor (or None) to the front, adding it if it is missing."""
    if value is None:
        return None
    return value.movedim(dim, 0) if dim is not None else value.expand(size, *value.shape)


def batch_tasks(op: Any, *, shared: Collection[int] = (), contiguous: Collection[int] = ()) -> None:
    """Register ``op`` with ``vmap``: T tasks are one call whose tensors have a task dimension in front.

    ``shared``: arguments that stay without one if all tasks share them. ``contiguous``: arguments that are copied if
    the task dimension leaves gaps in them. Lists of tensors (packed matrices) are always shared.
    """

    def rule(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        values = list(arguments)
        for position, (value, dim) in enumerate(zip(arguments, in_dims, strict=True)):
            if isinstance(value, Tensor) and (dim is not None or position not in shared):
                value = lead_task(value, dim, info.batch_size)
                values[position] = value.contiguous() if position in contiguous else value
        results = op(*values)
        return results, (0,) * len(results) if isinstance(results, tuple) else 0

    op.register_vmap(rule)


def results_like(op: Any, *positions: int) -> None:
    """Register the fake results of ``op``: contiguous tensors like the arguments at ``positions``."""

    def fake(*arguments: Any) -> Any:
        results = tuple(torch.empty_like(arguments[at], memory_format=torch.contiguous_format) for at in positions)
        return results if len(results) > 1 else results[0]

    op.register_fake(fake)


def rate_and_clock(
    p: float | Tensor, clock: Tensor | None, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """The rate of a dropout as a float32 tensor, and its clock; both are None if nothing is dropped."""
    if clock is None:
        return None, None
    if isinstance(p, Tensor):
        return p, clock
    if not 0.0 <= p < 1.0:
        raise InputError(f"dropout: p={p} must be at least 0 and below 1")
    return (torch.full((), p, dtype=torch.float32, device=device), clock) if p > 0.0 else (None, None)
