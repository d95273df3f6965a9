"""PersistentStep: the training step of one stack as one kernel, or as few as its other operators allow.

Shapes: T members of the stack.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.runtime.device.gc_pause import gc_disabled
from weft.runtime.step.stack import Stack
from weft.weave.persistent.kernel import launch_phases
from weft.weave.persistent.phases import Phases, Walk
from weft.weave.recorder import put_back, record

PROGRAMS = 256  # a power of two: at most two per multiprocessor of any GPU with 128 of them or more
TOLERANCE = 1e-2  # of losses, wide enough for half precision


class PersistentStep:
    """Forward, loss, backward and update of ``stack``, in place.

    Raises :class:`weft.core.errors.InputError` for a stack whose step cannot be traced. ``kernels`` and ``phases`` say
    how many kernels the last call launched, and how many phases they had together.
    """

    def __init__(self, stack: Stack, programs: int = PROGRAMS, warps: int | None = None) -> None:
        self.stack, self._programs, self._warps = stack, programs, warps
        self.kernels = self.phases = self.launches = 0
        self._counter = torch.zeros(1, dtype=torch.int32, device=stack.device)
        self._apart = self._losses(self._train)
        with gc_disabled():
            changed = stack.state.tensors().values()
            self._captured = record(self._train, stack.tasks[0].label, changed, apart=True, has_run=True)

    def _train(self) -> Tensor:
        return self.stack.train_step(self.stack.source.example())

    def __call__(self) -> Tensor:
        """One step; the losses ``[T]``."""
        self.kernels = self.phases = self.launches = 0
        return Walk(self._captured, self._launch)()

    def _launch(self, phases: Phases) -> None:
        self.kernels += 1
        self.phases += len(phases)
        self.launches += sum(len(phase) for phase in phases)
        launch_phases(phases, self._counter, self._programs, self._warps)

    def check(self) -> None:
        """An :class:`InputError` if a step has other losses than the stack's own; the state is as it was."""
        mine = self._losses(self)
        if not torch.allclose(mine, self._apart, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
            raise InputError(f"a loss of the persistent step is {mine.tolist()}, not {self._apart.tolist()}")

    def _losses(self, train) -> Tensor:
        with put_back(self.stack.state.tensors().values()):
            return train().detach().float().clone()
