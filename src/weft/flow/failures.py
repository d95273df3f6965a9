"""Errors of a part of the work by its name; memory that ran out stays what it is, so that less can be tried."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from weft.core.errors import OutOfMemoryError, TrainingError

OF_THE_HOST = ("can't allocate memory", "std::bad_alloc")  # torch's allocator, and its C++ for what is small
# Not from torch's allocator: a context or a captured graph, the code of a kernel, handles of NVIDIA's libraries.
OF_THE_DEVICE = ("CUDA error: out of memory", "Triton Error [CUDA]: out of memory", "_STATUS_ALLOC_FAILED")


def is_memory_error(error: BaseException) -> bool:
    """Whether it says that memory ran out, on the device or on the host."""
    if isinstance(error, (OutOfMemoryError, torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in (*OF_THE_HOST, *OF_THE_DEVICE))


@contextmanager
def named_failures(what_failed: str, besides: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Inside, errors become a :class:`TrainingError` that begins with ``what_failed``.

    Memory that ran out passes as it is, and so do the kinds of errors in ``besides``.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, besides) or is_memory_error(error):
            raise
        raise failure(what_failed, error) from error


def failure(what_failed: str, error: BaseException) -> TrainingError:
    """The error that says what failed, and of what."""
    return TrainingError(f"{what_failed}: {type(error).__name__}: {error}")
