"""A stage's work on a CUDA stream of its own, ordered before what later stages do with its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class OnDevice:
    """An item whose tensors another stream is still writing; ``ready`` is recorded behind that work."""

    item: Any
    ready: torch.cuda.Event


def arrived(item: Any, stream: torch.cuda.Stream | None = None) -> Any:
    """The item itself, once ``stream`` (the current one if None) waits for the work that makes it.

    Its tensors are marked as used by that stream, so that their memory is not reused while it reads them.
    """
    if not isinstance(item, OnDevice):
        return item
    stream = stream or torch.cuda.current_stream()
    stream.wait_event(item.ready)
    _mark_used(item.item, stream)
    return item.item


def _mark_used(item: Any, stream: torch.cuda.Stream) -> None:
    """Keep the memory of ``item`` from being reused before ``stream`` has read it."""
    for tensor in _tensors(item):
        if tensor.is_cuda:
            tensor.record_stream(stream)


def _tensors(item: Any) -> list[Tensor]:
    if isinstance(item, Tensor):
        return [item]
    if isinstance(item, (tuple, list)):
        return [tensor for part in item for tensor in _tensors(part)]
    return item.tensors() if hasattr(item, "tensors") else []


def on_stream(work: Callable[[Any], Any], device: torch.device) -> Callable[[Any], Any]:
    """``work`` on a stream of its own; on the CPU, ``work`` itself."""
    if device.type != "cuda":
        return work
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # what the stage reads may still be on its way there

    def run(item: Any) -> OnDevice:
        if not isinstance(item, OnDevice):  # made on the caller's stream, which may still be writing it
            stream.wait_stream(torch.cuda.current_stream(device))
            _mark_used(item, stream)
        with torch.cuda.stream(stream):
            result = work(arrived(item, stream))
            ready = torch.cuda.Event()
            ready.record(stream)
        return OnDevice(result, ready)

    return run
