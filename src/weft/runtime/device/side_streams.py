"""ConcurrentSteps: run the steps of several stacks concurrently, each on a stream of its own, joined at the end.

In a capture they become branches of one CUDA graph, so that kernels too small to fill the device share it. No kernels
are generated or compiled beyond those of the stacks alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weft.runtime.device.streams import side_streams

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
