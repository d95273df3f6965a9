"""Find stacks of users' modules that train slower than their members one after another, by timing their steps.

Torch runs some operators far slower for several tasks at once (``vmap``) than for each, and on a large graph the rows
of one task may stay in a cache that those of several do not fit into: no prediction knows them all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from weft.core.cost import Cost
from weft.core.plan import Plan
from weft.runtime.device.cuda_graph import Replay
from weft.runtime.device.process import same_draws, step_seconds
from weft.runtime.step.stack import Stack
from weft.runtime.step.state import State, put_back

# ---- Clocks for a step of a stack and one of a member alone, as each would run in training.
#
# On a CPU a step is what it takes eagerly. On a GPU it is recorded as a CUDA graph and replayed, as an epoch is: eager
# steps of small graphs would only tell how fast the host launches kernels.

ROUNDS = 3  # the fastest counts
ROUND_SECONDS, MOST_CALLS = 0.01, 20  # of a round: enough for a clock, few for training


class StepClock(Protocol):
    """Seconds of the gradients and of the logits in evaluation mode; states and generators are as they were.

    ``attempts``: how often to look at a stack before it is called slow. ``spent``: seconds that timing took so far.
    """

    attempts: int
    spent: float

    def alone(self, stack: Stack) -> float | None:
        """Of one member of ``stack``; None if that is not known."""

    def together(self, stack: Stack) -> float:
        """Of all members as one stack; infinite if there is no memory for it."""


class EagerClock:
    """Steps as they are called, on a CPU; those of members alone were timed when they were tried, too."""

    attempts = 3  # a busy machine makes single ones slower
    spent = 0.0

    def alone(self, stack: Stack) -> float | None:
        """The least of what trials of single members took, and two more now that memory is at hand."""
        tried, one = stack.members.alone_seconds, stack.members.alone
        if tried is None or one is None:
            return None
        return min(tried, *(_timed(one, one.state, stack.device) for _ in range(2)))

    def together(self, stack: Stack) -> float:
        """One step of the stack."""
        return _timed(_step(stack), stack.state, stack.device)


class ReplayClock:
    """Steps recorded and replayed, where ``record`` says that they are; what cannot be recorded runs eagerly here too.

    A recording takes the memory of a step, and is given back before anything else is recorded.
    """

    attempts = 2

    def __init__(self, device: torch.device, record: bool) -> None:
        self._device, self._record, self.spent = device, record, 0.0

    def alone(self, stack: Stack) -> float | None:
        """The step of one member, by itself."""
        one = stack.members.alone
        found = math.inf if one is None else self._seconds(one, list(one.state.tensors().values()))
        return found if math.isfinite(found) else None

    def together(self, stack: Stack) -> float:
        """The step of the stack."""
        return self._seconds(_step(stack), list(stack.state.tensors().values()))

    def _seconds(self, step: Callable[[], None], changed: Sequence[Tensor]) -> float:
        begin = time.perf_counter()
        found = math.inf
        try:
            with same_draws(self._device), put_back(changed):
                found = self._fastest(Replay(step, changed, record=self._record))
        except torch.OutOfMemoryError:
            pass  # as planned it may fit: nothing is beside it then
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # only here nothing holds the recording or a failed attempt
        self.spent += time.perf_counter() - begin
        return found

    def _fastest(self, replay: Replay) -> float:
        """Seconds of a call: the fastest round of several."""
        self._round(replay, 1)  # the first one moves the graph to the device
        calls = max(1, min(MOST_CALLS, int(ROUND_SECONDS / max(self._round(replay, 1), 1e-6))))
        return min(self._round(replay, calls) for _ in range(ROUNDS))

    def _round(self, replay: Replay, calls: int) -> float:
        self._wait()
        begin = time.perf_counter()
        for _ in range(calls):
            replay()
        self._wait()
        return (time.perf_counter() - begin) / calls

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def clock_of(stack: Stack, plan: Plan) -> StepClock:
    """The clock for the steps of ``stack``, which trains as ``plan`` says."""
    return EagerClock() if stack.device.type == "cpu" else ReplayClock(stack.device, plan.replay)


def _timed(step: Callable[[], None], state: State, device: torch.device) -> float:
    """Seconds of one eager step on a CPU; ``state`` and generators are as they were."""
    with same_draws(device), put_back(state.tensors().values()):
        begin = step_seconds()
        step()
        return step_seconds() - begin


def _step(stack: Stack) -> Callable[[], None]:
    """What is timed of a stack."""
    batch = stack.source.example()

    def step() -> None:
        stack.gradients(stack.state.flat, batch)
        with torch.no_grad():
            stack.logits(stack.state.flat, batch)

    return step


SLOWER = 0.97  # times what the members take, from which on a stack is not worth it: less is within the noise of steps
WORTH_SECONDS = 0.1  # of the whole training: what takes less is not worth a note
# On a GPU. The optimizer and the records of an epoch are not timed, and a stack has fewer launches of them.
REPLAYED = 1.02
COMPILED = 1.25  # if the step is compiled afterwards, which changes what both take
LEAST_SECONDS = 0.1  # of the whole training, as predicted: about what timing on a GPU takes


def slower_than_alone(stack: Stack, plan: Plan) -> str | None:
    """Why ``stack`` should be taken apart, in words; None if it should not, or nothing is known."""
    members, epochs = len(stack.tasks), max(task.epochs for task in stack.tasks)
    whole = stack.source.constant and stack.source.reduce.ranks == 1
    if members < 2 or not stack.members.is_users or not is_timed(plan, whole, epochs):
        return None
    clock = clock_of(stack, plan)
    one = clock.alone(stack)
    if one is None or members * one * epochs < clock.spent:
        return None
    alone, together = members * one, math.inf
    for _ in range(clock.attempts):
        together = min(together, clock.together(stack))
        if together <= most_seconds(alone, epochs, plan) or math.isinf(together):
            return None
    return f"a step of the stack takes {together * 1e3:.3g} ms, the steps of its members {alone * 1e3:.3g} ms"


def is_timed(plan: Plan, whole: bool, epochs: int) -> bool:
    """Whether timing a stack of ``plan`` can repay: on a GPU not for trainings that are shorter than that.

    Nor where batches are sampled, which the members of a stack share: only steps are timed.
    """
    if plan.device == "cpu":
        return True
    predicted = Cost.from_dict(plan.cost).epoch_seconds * epochs if plan.cost else math.inf
    return whole and predicted >= LEAST_SECONDS


def most_seconds(alone: float, epochs: int, plan: Plan) -> float:
    """What a step of a stack may take without being taken apart, if its members' steps take ``alone`` in turn."""
    if plan.device != "cpu":
        return (COMPILED if plan.compiled else REPLAYED) * alone
    short = (1 - SLOWER) * alone * epochs < WORTH_SECONDS
    return alone + WORTH_SECONDS / epochs if short else SLOWER * alone
