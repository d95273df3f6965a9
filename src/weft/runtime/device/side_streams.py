"""ConcurrentSteps: the steps of several stacks at once, each on a stream of its own, joined at the end.

Inside of a recording they become branches of one CUDA graph, so that kernels too small to fill the device share it. No
kernel is generated and none is compiled that the stacks alone would not need.
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
    """``beside(steps)`` makes every call; those that come to the same stream one after another.

    What the steps build on first use (transposes, work lists) has to be there before: one stream does not wait for
    another.
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
