"""Weft's own CUDA streams, made once per process.

Libraries keep memory for every stream they have been called on, for good: cuBLAS 32 MiB per thread and stream on an
H200. torch returns 32 streams in turn, so a process that took a new one for every capture would end up holding a
gigabyte of workspaces, outside of any budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

SIDE_STREAMS = 4
FIRST = -1  # priority of a stream whose kernels go before those of others


def recording_stream(device: torch.device | None = None) -> torch.cuda.Stream:
    """The one stream of ``device`` (None: the current one) for every warm-up and every capture."""
    return _streams(_index(device))[0]


def side_streams(count: int, device: torch.device | None = None) -> list[torch.cuda.Stream]:
    """``count`` streams for work inside of a step that may overlap: :data:`SIDE_STREAMS` of them, in turn."""
    side = _streams(_index(device))[1:]
    return [side[place % SIDE_STREAMS] for place in range(count)]


def fetching_stream(device: torch.device | None = None) -> torch.cuda.Stream:
    """The stream on which the next batch is sampled and fetched while the current one trains."""
    return _apart(_index(device))[0]


def urgent_stream(device: torch.device | None = None) -> torch.cuda.Stream:
    """The stream for capturing what other streams work beside: its kernels keep their priority in a replay."""
    return _apart(_index(device))[1]


@cache
def _apart(index: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.Stream(index), torch.cuda.Stream(index, priority=FIRST)


@cache
def _streams(index: int) -> tuple[torch.cuda.Stream, ...]:
    # All at once, since consecutive streams of torch are distinct.
    return tuple(torch.cuda.Stream(index) for _ in range(1 + SIDE_STREAMS))


def _index(device: torch.device | None) -> int:
    index = None if device is None else device.index
    return torch.cuda.current_device() if index is None else index


# ---- ConcurrentSteps: run the steps of several stacks concurrently, each on a stream of its own, joined at the end.
#
# In a capture they become branches of one CUDA graph, so that kernels too small to fill the device share it. No
# kernels
# are generated or compiled beyond those of the stacks alone.

Steps = Sequence[Callable[[], None]]


def in_turn(steps: Steps) -> None:
    """One after another, on the stream of the caller."""
    for step in steps:
        step()


class ConcurrentSteps:
    """Makes every call of ``steps``; those on the same stream one after another.

    What the steps build on first use (transposes, work lists) must exist before: one stream does not wait for another.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, steps: Steps) -> None:
        current = torch.cuda.current_stream(self._device)
        streams = side_streams(len(steps), self._device)
        for stream in dict.fromkeys(streams):
            stream.wait_stream(current)
        for stream, step in zip(streams, steps, strict=True):
            with torch.cuda.stream(stream):
                step()
        for stream in dict.fromkeys(streams):
            current.wait_stream(stream)
