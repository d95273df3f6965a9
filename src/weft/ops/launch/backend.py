"""Choose the implementation for a tensor (Triton or CPU), register operators with torch, know the limits of a GPU."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import InputError


@cache
def have_triton() -> bool:
    """True if Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


# Whether tensors on meta stand for a GPU, and the limits of the device that launches are chosen for, if not its own.
_STANDS_FOR: ContextVar[tuple[bool, DeviceLimits | None]] = ContextVar("what meta stands for", default=(False, None))


@contextmanager
def _standing_for(gpu: bool, limits: DeviceLimits | None) -> Iterator[None]:
    token = _STANDS_FOR.set((gpu, limits))
    try:
        yield
    finally:
        _STANDS_FOR.reset(token)


def meta_means_gpu(yes: bool = True) -> AbstractContextManager[None]:
    """Send tensors on the ``meta`` device (sizes without data) along the path of GPU tensors.

    So a step can be dry-run, allocation by allocation, as a GPU would run it, on a machine without one.
    """
    return _standing_for(yes, _STANDS_FOR.get()[1])


def assume_limits(limits: DeviceLimits | None) -> AbstractContextManager[None]:
    """Choose launches for a device with these ``limits``: the machine planned for, or a test's; None: no change."""
    gpu, before = _STANDS_FOR.get()
    return _standing_for(gpu, before if limits is None else limits)


def on_gpu(tensor: Tensor) -> bool:
    """True if ``tensor`` is on a GPU, or on meta in place of one: see :func:`meta_means_gpu`."""
    return tensor.is_cuda or (tensor.is_meta and _STANDS_FOR.get()[0])


def use_triton(tensor: Tensor) -> bool:
    """GPU tensors go to Triton kernels, others to the CPU path."""
    return on_gpu(tensor) and (have_triton() or tensor.is_meta)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums run in float32, or in float64 for float64 input."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def next_power_of_2(value: int) -> int:
    """Smallest power of two that is at least ``value``."""
    return 1 << max(value - 1, 0).bit_length()


# ---- Register an operator with torch without importing torch's compiler when it first runs.
#
# ``torch.library.custom_op`` wraps every implementation in ``torch._dynamo.disable``. Its first call imports dynamo,
# Inductor and sympy: two seconds. Before dynamo is imported there is nothing to disable, so the function is called
# directly; from then on it is wrapped as torch would have done.

DYNAMO = "torch._dynamo"
_DISABLED = "__dynamo_disable"  # where torch keeps the wrapped function, from its first call on


def custom_op(name: str, schema: str, mutates_args: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """``torch.library.custom_op``, whose implementation imports no compiler."""

    def called_plainly(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            disable = getattr(sys.modules.get(DYNAMO), "disable", None)
            if disable is None:
                return fn(*args, **options)
            disabled = disable(fn, True, wrapping=False)
            setattr(fn, _DISABLED, disabled)
            return disabled(*args, **options)

        return call

    def register(fn: Callable[..., Any]) -> Any:
        op = torch.library.custom_op(name, mutates_args=mutates_args, schema=schema)(fn)
        for implementation in getattr(op, "_backend_fns", {}).values():
            inner = getattr(implementation, "__wrapped__", None)
            if inner is not None and getattr(inner, _DISABLED, None) is None:
                setattr(inner, _DISABLED, called_plainly(inner))
        return op

    return register


def by_device(kernels: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation of an operator: ``kernels`` if its first argument goes to Triton, else ``reference``."""
    return lambda first, *rest: (kernels if use_triton(first) else reference)(first, *rest)


def lead_task(value: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """Bring the batch dimension of a tensor (or None) to the front, adding it if it is missing."""
    if value is None:
        return None
    return value.movedim(dim, 0) if dim is not None else value.expand(size, *value.shape)


def task_rows(x: Tensor, dim: int | None, like: Tensor) -> Tensor:
    """``x`` for the tasks of ``like [T, ..., N, O]``: an ``x [N, I]`` that all of them share stays as it is."""
    if dim is None and x.dim() == 2:
        return x
    x = x.movedim(dim, 0) if dim is not None else x.expand(like.shape[0], *x.shape)
    inner = like.shape[1 : 1 + like.dim() - x.dim()]  # tasks of an inner vmap, which share x
    return x.reshape(x.shape[0], *(1,) * len(inner), *x.shape[1:]).expand(x.shape[0], *inner, *x.shape[1:])


def batch_tasks(
    op: Any, *, shared: Collection[int] = (), contiguous: Collection[int] = (), like: Sequence[int] = (),
    rows: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Register ``op`` with ``vmap``: T tasks are one call whose tensors have a task dimension in front.

    ``shared``: arguments that stay without one if all tasks share them. ``contiguous``: arguments that are copied if
    the task dimension leaves gaps in them. Lists of tensors (packed matrices) are always shared. ``like``: registers
    fake results as well, contiguous tensors like these arguments. ``rows``: the argument that :func:`task_rows` serves,
    and the one whose tasks it is for.
    """

    def rule(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        values = list(arguments)
        for position, (value, dim) in enumerate(zip(arguments, in_dims, strict=True)):
            if isinstance(value, Tensor) and (dim is not None or position not in shared):
                value = lead_task(value, dim, info.batch_size)
                values[position] = value.contiguous() if position in contiguous else value
        if rows is not None:
            values[rows[0]] = task_rows(arguments[rows[0]], in_dims[rows[0]], values[rows[1]])
        results = op(*values)
        return results, (0,) * len(results) if isinstance(results, tuple) else 0

    def fake(*arguments: Any) -> Any:
        results = tuple(torch.empty_like(arguments[at], memory_format=torch.contiguous_format) for at in like)
        return results if len(results) > 1 else results[0]

    op.register_vmap(rule)
    if like:
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


def once_for_all(value: Tensor, lead: int) -> Tensor:
    """``value`` contiguous; a single copy, without the ``lead`` dimensions, if all tasks share the same memory."""
    if lead and value.numel() and not any(value.stride()[:lead]):
        value = value[(0,) * lead]
    return value.contiguous()


# ---- The limits of a GPU that launch parameters depend on: multiprocessors, cache, shared memory.
#
# Launch parameters were measured on an H200. They are written in terms of these limits, so that every number on an H200
# is the one that was measured, and another GPU gets its own share: as many programs per multiprocessor, the same part
# of its cache.


@dataclass(frozen=True)
class DeviceLimits:
    """``sms`` multiprocessors, bytes of L2, bytes of shared memory that a block may ask for, threads resident per
    multiprocessor.
    """

    sms: int
    l2_bytes: int
    shared_memory_per_block: int
    max_threads_per_sm: int = 2048

    def programs(self, per_sm: int) -> int:
        """Programs that share all rows, so many per multiprocessor."""
        return per_sm * self.sms

    @property
    def l2_for_rows(self) -> int:
        """Bytes of gathered rows that stay in the L2, leaving room for indices and output: 48 MiB on an H200."""
        return self.l2_bytes * 4 // 5

    @property
    def l2_for_coefficients(self) -> int:
        """Bytes of coefficients that stay in the L2 between two passes: 50 MiB on an H200."""
        return self.l2_bytes * 5 // 6

    @property
    def l1_for_rows(self) -> int:
        """Bytes of rows that stay in an L1: half of it, the rest being shared memory. 128 KiB on an H200.

        Shared memory is carved out of the L1, whose size is the power of two above it.
        """
        return (1 << (self.shared_memory_per_block - 1).bit_length()) // 2


H200 = DeviceLimits(sms=132, l2_bytes=60 * 2**20, shared_memory_per_block=232448)
LEAST_SHARED = 101376  # of GPUs from 2020 on, if torch does not report it


def limits_of(device: torch.device) -> DeviceLimits:
    """The limits of ``device``. Tensors without data, which stand for a GPU, have those of an H200 unless others are
    assumed; CUDA is not touched for them, nor for tensors on a CPU.
    """
    assumed = _STANDS_FOR.get()[1]
    if assumed is not None:
        return assumed
    if device.type != "cuda":
        return H200
    return _of_gpu(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _of_gpu(index: int) -> DeviceLimits:
    properties = torch.cuda.get_device_properties(index)
    return DeviceLimits(
        sms=properties.multi_processor_count,
        l2_bytes=int(getattr(properties, "L2_cache_size", 0)) or H200.l2_bytes,
        shared_memory_per_block=getattr(properties, "shared_memory_per_block_optin", LEAST_SHARED),
        max_threads_per_sm=getattr(properties, "max_threads_per_multi_processor", H200.max_threads_per_sm),
    )
