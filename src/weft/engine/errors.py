"""Turn out-of-memory exceptions into one-line errors."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from weft.batches.source import is_memory_error
from weft.core.compatibility import function_name
from weft.core.errors import ModelError, OutOfMemoryError, WeftError
from weft.core.task import Task
from weft.engine.machine import device_name
from weft.engine.memory import give_back_heap
from weft.runtime.modules.settings import in_one_line, place_of


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
        where = device_name(device)
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            where += f", {total / 2**30:.1f} GiB of which {free / 2**30:.1f} GiB are free"
        raise OutOfMemoryError(
            f"{_who(names)}: the device ran out of memory ({where}); "
            "try a smaller hidden or fewer layers, precision='bf16', or another device"
        ) from error


def give_back_memory(device: torch.device, gone: bool = False) -> None:
    """Let go of what a group held, so that the next one finds it; ``gone``: no cycle of references holds it."""
    if not gone:
        gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        give_back_heap()


# ---- Turn exceptions of users' modules into one sentence with file and line.

FUNCTIONS = ("objective", "metric", "optimizer")


@contextmanager
def clear_model_errors(tasks: Sequence[Task]) -> Iterator[None]:
    """Turn what a module of the user's own raises into a :class:`ModelError`.

    Errors of memory and Weft's own pass as they are. So does everything in a group of built-in models: that is a fault
    of Weft's, and its traceback is worth having.
    """
    try:
        yield
    except WeftError:
        raise
    except Exception as error:
        own = [task for task in tasks if task.traits is None or any(map(task.has_own, FUNCTIONS))]
        if not own or is_memory_error(error):
            raise
        raise ModelError(f"{_who([task.label for task in own])}: {what_was_raised(error, own[0])}") from error


def what_was_raised(error: Exception, task: Task) -> str:
    """The error, where in the user's code it comes from, and by which function of the user's own, or the model."""
    called = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    own = ((setting, function_name(getattr(task, setting))) for setting in FUNCTIONS if task.has_own(setting))
    whose = next((f"{setting} {name}" for setting, name in own if name in called), f"model {task.model_name}")
    return f"{whose} raised {in_one_line(error)} ({place_of(error, task.model)})"


def _who(names: Sequence[str]) -> str:
    return f"task {names[0]!r}" if len(names) == 1 else f"{len(names)} tasks ({names[0]!r}, ...)"
