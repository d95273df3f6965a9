"""Turn exceptions of training into one-line errors, with file and line of users' code."""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from weft.batches.source import is_memory_error
from weft.core.compatibility import function_name
from weft.core.errors import ModelError, OutOfMemoryError, WeftError
from weft.core.task import Task
from weft.core.units import show_bytes
from weft.engine.machine import device_name
from weft.engine.memory import give_back_heap, memory_fraction
from weft.runtime.modules.settings import in_one_line, place_of

REQUEST = re.compile(r"ried to allocate ([\d.]+ \w+)")  # in the messages of torch's allocators
FUNCTIONS = ("objective", "metric", "optimizer")


@contextmanager
def clear_errors(tasks: Sequence[Task], device: torch.device, models: bool = True) -> Iterator[None]:
    """Turn exceptions into one sentence: memory that ran out, and with ``models`` what users' modules raise.

    Weft's own errors pass as they are. So does everything else in a group of built-in models: that is a fault of
    Weft's, and its traceback is worth having.
    """
    try:
        yield
    except WeftError:
        raise
    except Exception as error:
        if is_memory_error(error):
            raise OutOfMemoryError(
                f"{_who(tasks)}: the device ran out of memory ({_bytes_in_words(device, error)}); "
                "try a smaller hidden or fewer layers, precision='bf16', or another device"
            ) from error
        own = [task for task in tasks if task.traits is None or any(map(task.has_own, FUNCTIONS))]
        if not models or not own:
            raise
        raise ModelError(f"{_who(own)}: {what_was_raised(error, own[0])}") from error


def what_was_raised(error: Exception, task: Task) -> str:
    """The error, where in the user's code it comes from, and by which function of the user's own, or the model."""
    called = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    own = ((setting, function_name(getattr(task, setting))) for setting in FUNCTIONS if task.has_own(setting))
    whose = next((f"{setting} {name}" for setting, name in own if name in called), f"model {task.model_name}")
    return f"{whose} raised {in_one_line(error)} ({place_of(error, task.model)})"


def _bytes_in_words(device: torch.device, error: Exception) -> str:
    """The device, what is free there, the cap of this process and what it holds, and the request that failed."""
    words = [device_name(device)]
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        words[0] += f", {total / 2**30:.1f} GiB of which {free / 2**30:.1f} GiB are free"
        cap = show_bytes(memory_fraction(device) * total)
        reserved = show_bytes(torch.cuda.memory_reserved(device))
        tensors = show_bytes(torch.cuda.memory_allocated(device))
        words.append(f"this process may reserve {cap} and has reserved {reserved}, {tensors} of it in tensors")
    request = REQUEST.search(str(error))
    return "; ".join([*words, *([f"{request[1]} more were requested"] if request else [])])


def _who(tasks: Sequence[Task]) -> str:
    first = repr(tasks[0].label)
    return f"task {first}" if len(tasks) == 1 else f"{len(tasks)} tasks ({first}, ...)"


def give_back_memory(device: torch.device, gone: bool = False) -> None:
    """Let go of what a group held, so that the next one finds it; ``gone``: no cycle of references holds it."""
    if not gone:
        gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        give_back_heap()
