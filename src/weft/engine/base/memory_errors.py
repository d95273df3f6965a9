"""Turn out-of-memory exceptions into one-line errors."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from weft.core.errors import OutOfMemoryError, WeftError
from weft.engine.base.device import device_name
from weft.engine.base.process_memory import give_back_heap
from weft.flow.failures import is_memory_error


@contextmanager
def clear_memory_errors(names: Sequence[str], device: torch.device) -> Iterator[None]:
    """Turn whatever says that memory ran out into an :class:`OutOfMemoryError` that names the tasks."""
    try:
        yield
    except WeftError:
        raise
    except Exception as error:
        if not is_memory_error(error):
            raise
        raise OutOfMemoryError(_message(names, device)) from error


def give_back_memory(device: torch.device, gone: bool = False) -> None:
    """Let go of what a group held, so that the next one finds it; ``gone``: no cycle of references holds it."""
    if not gone:
        gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        give_back_heap()


def _message(names: Sequence[str], device: torch.device) -> str:
    place = device_name(device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        place += f", {total / 2**30:.1f} GiB of which {free / 2**30:.1f} GiB are free"
    who = f"task {names[0]!r}" if len(names) == 1 else f"{len(names)} tasks ({names[0]!r}, ...)"
    return (
        f"{who}: the device ran out of memory ({place}); "
        "try a smaller hidden or fewer layers, precision='bf16', or another device"
    )
