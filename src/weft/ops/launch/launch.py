"""The few things that the launchers of Triton kernels share."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.launch.triton_lang import tl

PROGRAMS = 528  # that share rows out among themselves: four to each of an H200's 132 multiprocessors


def triton_acc(dtype: torch.dtype):
    """The accumulation type in Triton's terms."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def flatten_tasks(value: Tensor, keep: int) -> Tensor:
    """``[..., a, b]`` to contiguous ``[T, a, b]``, ``keep`` trailing dimensions kept."""
    lead = value.dim() - keep
    return value.reshape(value.shape[:lead].numel(), *value.shape[lead:]).contiguous()


def per_task_stride(value: Tensor | None, tasks: int, width: int) -> int:
    """Elements between two tasks' values, 0 where they share one (or there is none)."""
    return width if value is not None and tasks > 1 and value.numel() == tasks * width else 0


def once_for_all(value: Tensor, lead: int) -> Tensor:
    """``value`` contiguous; one copy of it, without the ``lead`` dimensions, where all tasks see the same memory."""
    if lead and value.numel() and not any(value.stride()[:lead]):
        value = value[(0,) * lead]
    return value.contiguous()


H200_SHARED = 232448  # what a tensor without data stands for
LEAST_SHARED = 101376  # of the GPUs from 2020 on, where torch does not say


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block may have on ``device``."""
    if device.type != "cuda":
        return H200_SHARED
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", LEAST_SHARED)
