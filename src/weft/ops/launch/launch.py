"""Helpers that the launchers of Triton kernels share: accumulation type, task strides, contiguous inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.launch.triton_lang import tl


def triton_acc(dtype: torch.dtype):
    """The accumulation type in Triton's terms."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def flatten_tasks(value: Tensor, keep: int) -> Tensor:
    """``[..., a, b]`` to contiguous ``[T, a, b]``, ``keep`` trailing dimensions kept."""
    lead = value.dim() - keep
    return value.reshape(value.shape[:lead].numel(), *value.shape[lead:]).contiguous()


def per_task_stride(value: Tensor | None, tasks: int, width: int) -> int:
    """Elements between two tasks' values, 0 if they share one (or there is none)."""
    return width if value is not None and tasks > 1 and value.numel() == tasks * width else 0


def once_for_all(value: Tensor, lead: int) -> Tensor:
    """``value`` contiguous; a single copy, without the ``lead`` dimensions, if all tasks share the same memory."""
    if lead and value.numel() and not any(value.stride()[:lead]):
        value = value[(0,) * lead]
    return value.contiguous()


def common_lead(one: Tensor, other: Tensor) -> torch.Size:
    """The leading dimensions of ``one [..., a, b]`` and ``other [..., c, d]``, broadcast.

    Most are equal, or one has none; ``torch.broadcast_shapes`` would import sympy to find that out.
    """
    a, b = one.shape[:-2], other.shape[:-2]
    if a == b or not b:
        return a
    return b if not a else torch.broadcast_shapes(a, b)
