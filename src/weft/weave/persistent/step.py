"""PersistentStep: the training step of one stack as one kernel, or as few as its other operators allow.

Shapes: T members of the stack.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.runtime.device.gc_pause import gc_disabled
from weft.runtime.step.stack import Stack
from weft.weave.persistent.kernel import PhasesLaunch, launch_phases
from weft.weave.persistent.phases import Phases, Walk
from weft.weave.recorder import put_back, record

LAUNCH = PhasesLaunch(256, warps=4)  # at most two programs per multiprocessor of any GPU with 128 of them or more
TOLERANCE = 1e-2  # of losses and gradients, wide enough for half precision


class PersistentStep:
    """Forward, loss, backward and update of ``stack``, in place.

    Raises :class:`weft.core.errors.InputError` for a stack whose step cannot be traced. ``kernels`` and ``phases`` say
    how many kernels the last call launched, and how many phases they had together.
    """

    def __init__(self, stack: Stack, launch: PhasesLaunch = LAUNCH) -> None:
        self.stack, self._parameters = stack, launch
        self.kernels = self.phases = self.launches = 0
        self._counter = torch.zeros(1, dtype=torch.int32, device=stack.device)
        self._apart = self._outcome(self._train)
        with gc_disabled():
            changed = stack.state.tensors().values()
            self._captured = record(self._train, stack.tasks[0].label, changed, apart=True, has_run=True)

    def _train(self) -> Tensor:
        return self.stack.train_step(self.stack.source.example())

    def __call__(self) -> Tensor:
        """One step; the losses ``[T]``."""
        self.kernels = self.phases = self.launches = 0
        return Walk(self._captured, self._launch)()

    def collected(self) -> list[Phases]:
        """The phases of every kernel of a step, not launched: a step is one kernel unless torch computes in between."""
        found: list[Phases] = []
        Walk(self._captured, found.append)()
        return found

    def _launch(self, phases: Phases) -> None:
        self.kernels += 1
        self.phases += len(phases)
        self.launches += sum(len(phase) for phase in phases)
        launch_phases(phases, self._counter, self._parameters)

    def check(self) -> None:
        """An :class:`InputError` if a step has other losses or gradients than the stack's own; the state is as it was.

        Gradients are compared by the optimizer's moments, which are sums of them: a wrong one does not show in the loss
        before the next step.
        """
        mine = self._outcome(self)
        for kind, found, expected in zip(("loss", *["gradient"] * len(mine)), mine, self._apart, strict=False):
            if not _is_close(found, expected):
                raise InputError(f"a {kind} of the persistent step is {_shown(found)}, not {_shown(expected)}")

    def _outcome(self, train: Callable[[], Tensor]) -> list[Tensor]:
        """Losses ``[T]`` and moments ``[T, P]`` after one step; the state is as it was."""
        with put_back(self.stack.state.tensors().values()):
            losses = train().detach()
            return [one.float().clone() for one in (losses, *self.stack.state.moments)]


def _is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether the difference is small against the whole; NaN is equal to NaN."""
    difference = torch.where(found.isnan() & expected.isnan(), 0.0, found - expected)
    return bool(difference.norm() <= TOLERANCE * (1e-3 + expected.nan_to_num().norm()))


def _shown(value: Tensor) -> str:
    return f"{value.flatten()[0]:g}" if value.numel() == 1 else f"{value.norm():g} long"
