"""WovenStep: the training steps of several stacks merged into one, whose operators share launches.

Each stack's step is traced while it runs once (and its state restored); the traces are merged by
:func:`weft.weave.merge.weave`. Evaluation and book-keeping stay per stack, concurrent on a GPU. :class:`Weaver` offers
merged steps to the runtime.

Shapes: T members of a stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.capture.observer import Observer
from weft.core.errors import InputError
from weft.core.plan import FILLS_DEVICE
from weft.core.startup import no_collections
from weft.ops.launch.backend import on_gpu
from weft.runtime.device.cuda_graph import SIDE_STREAMS, ConcurrentSteps, Steps
from weft.runtime.dry_run import dry_run_concurrent
from weft.runtime.step.stack import Stack
from weft.weave.launchers import register
from weft.weave.merge import OWN_STREAM, Woven, weave
from weft.weave.recorder import record, restored
from weft.weave.stream_schedule import Streamed, run_node, schedule

TOLERANCE = 1e-2  # of losses, wide enough for half precision


class WovenStep:
    """One epoch of ``stacks``, in place, as one merged step.

    Raises :class:`weft.core.errors.InputError` for stacks whose steps cannot be traced. ``push`` as in
    :func:`weft.weave.merge.weave`. ``side_streams``: how many streams members' own work is spread over on a GPU, 0
    for the caller's alone; None decides by the size of the graph, since streams also keep memory from each other.
    """

    def __init__(self, stacks: Sequence[Stack], side_streams: int | None = None, push: bool = False) -> None:
        self.stacks = tuple(stacks)
        if side_streams is None:
            side_streams = SIDE_STREAMS if _is_small(stacks) else 0
        self.side_streams = side_streams
        self._separate_losses = self._losses(lambda: [_train(stack) for stack in stacks])
        self.woven: Woven = merged(stacks, push)
        self._device = stacks[0].device
        self._run: Callable[[], tuple[Any, ...]] = self.woven
        self._concurrently: Callable[[Steps], None] | None = None  # None: in turn
        if side_streams > 0 and self._device.type == "cuda":
            self._run = Streamed(self.woven, side_streams, self._device)
            self._concurrently = ConcurrentSteps(self._device)

    def check(self) -> None:
        """Train one epoch from the stacks' initial state, and restore their states.

        Raises :class:`InputError` if the losses differ from those of the stacks' own steps: kernels generated for a
        group are used only if they reproduce those. Meta tensors have nothing to compare.
        """
        if self._device.type == "meta":
            return
        woven, separate = self._losses(self.train), self._separate_losses
        if not torch.allclose(woven, separate, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
            worst = int((woven - separate).abs().nan_to_num(nan=torch.inf).argmax())
            raise InputError(f"a loss of the merged step is {woven[worst]:g} where it should be {separate[worst]:g}")

    def _losses(self, train: Callable[[], Sequence[Tensor]]) -> Tensor:
        """Losses of all members by one way to train an epoch, ``[sum of T]``; the stacks are restored."""
        with restored(tensor for stack in self.stacks for tensor in stack.state.tensors().values()):
            return torch.cat([loss.detach().float().clone() for loss in train()])

    def train(self) -> tuple[Tensor, ...]:
        """Forward, loss, backward and update of every stack; their losses ``[T]``."""
        return self._run()

    def __call__(self, evaluated: bool = True) -> None:
        """Train one epoch and record the outcome, on the side streams if there are any.

        Without an evaluation only the training losses are recorded.
        """
        pairs = zip(self.stacks, self.train(), strict=True)
        records = [partial(stack.record, losses, evaluated) for stack, losses in pairs]
        if self._concurrently is not None:
            self._concurrently(records)
        else:
            for record_stack in records:
                record_stack()

    def observe(self, observer: Observer, streams: bool) -> None:
        """Report the phase and the stream of every operator to ``observer``, from the next call on.

        A merged step runs without autograd: gradients are operators like any other, and its nodes carry their phase.
        With ``streams`` they are reported as issued to several streams, which do not share memory: a dry run has no
        streams, but the schedule says on which one each operator would run, and when its result would be released.
        """
        on_streams = streams and self.side_streams > 0
        if on_streams:
            self._concurrently = dry_run_concurrent(observer)
        actions = schedule(self.woven, SIDE_STREAMS if on_streams else 0).actions

        def run() -> tuple[Any, ...]:
            values = self.woven.initial_values()
            for action in actions:
                observer.phase = "backward" if action.node.meta.get("backward") else "forward"
                observer.stream = action.stream
                run_node(action.node, values)
                for dead in action.drops:
                    del values[dead]
            observer.phase, observer.stream = "evaluation", OWN_STREAM
            return self.woven.returned(values)

        self._run = run


def merged(stacks: Sequence[Stack], push: bool = False) -> Woven:
    """The steps of ``stacks``, which have run before, traced and merged into one; the stacks are restored."""
    # A CPU launches nothing. With dense operators in the rounds, backward sums of one member hardly meet forward ones.
    small = _is_small(stacks) and on_gpu(stacks[0].state.flat) and not push
    captured = []
    with no_collections():
        for stack in stacks:
            labels = [task.label for task in stack.tasks]
            name = labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} more"
            changed = stack.state.tensors().values()
            captured.append(record(partial(_train, stack), name, changed, split=small, has_run=True))
        # A backward sum is pushed where it meets forward ones, which are over another structure.
        return weave(captured, ("any",) if push else ("same", "any"), push, small)


def _train(stack: Stack) -> Tensor:
    return stack.train_step(stack.source.example())


def _is_small(stacks: Sequence[Stack]) -> bool:
    return stacks[0].graph.num_edges < FILLS_DEVICE


class Weaver:
    """Makes merged steps for :class:`weft.runtime.group.GroupRun`, and reports them to a dry run.

    ``push`` selects TurboMGNN's pull-and-push: see :func:`weft.weave.merge.weave`.
    """

    def __init__(self, push: bool = False) -> None:
        self._push = push

    def merge(self, stacks: Sequence[Stack]) -> WovenStep:
        """The checked merged step of ``stacks``; raises InputError if they cannot be merged."""
        step = WovenStep(stacks, push=self._push)
        step.check()
        return step

    def observe(self, step: WovenStep, observer: Observer, streams: bool) -> None:
        """Report the operators of ``step`` to ``observer`` from its next call on."""
        register()
        step.observe(observer, streams)
