"""Epochs of several steps, each on a batch of its own; and timing of steps, which finds stacks that are too slow.

An epoch of a constant source is one step: :class:`weft.runtime.group.GroupRun` runs it as a whole.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.batches.source import Batch, Source
from weft.core.cost import Cost
from weft.core.plan import Plan
from weft.runtime.device.cuda_graph import Recordings, Replay, streams_of
from weft.runtime.device.process import same_draws, step_seconds
from weft.runtime.step.stack import Stack
from weft.runtime.step.state import restored

NOT_CAPTURED = "{} eagerly: it could not be captured as a CUDA graph ({})"
BUFFERS = 2  # of batches: one is trained on while the other is filled

RunStack = Callable[[Stack, Callable[[], None]], None]
OwnGradients = Sequence[tuple[Tensor, Tensor]]  # of every stack, on one of several ranks; none on one rank


@dataclass
class BatchSlot:
    """A batch of one shape in one of the buffers: its inputs, what is fetched for it, and its two CUDA graphs."""

    buffer: int
    batch: Batch
    fetched: Any = None
    fetch: Replay | None = None
    train: Replay | None = None
    own: OwnGradients = ()


class OverlappedSteps:
    """Sample and fetch the next batch on a stream of its own while the current one trains.

    A batch is fetched into one of two buffers by a CUDA graph on the fetching stream, while the batch in the other is
    trained on by another CUDA graph on the caller's stream:

        fetching stream   | fetch 0 | fetch 1 |   fetch 2   |   fetch 3   | ...
        caller's stream             | train 0 | train 1     | train 2     | ...

    Events order them: training waits until its buffer is full, fetching until the batch before in its buffer is
    trained on. Training and each buffer's fetching have memory pools of their own. The result is that of one step
    after another: a batch depends on its seeds and clock alone, and training on batches in their order.

    ``step(batch)`` trains on a built batch and writes ``changed``; ``counters`` are written by fetching. Over ranks it
    computes gradients, which ``finish`` sums and updates by, outside of any CUDA graph.
    """

    def __init__(
        self,
        step: Callable[[Batch], OwnGradients],
        finish: Callable[[Batch, OwnGradients], None],
        changed: list[Tensor],
        counters: list[Tensor],
        device: torch.device,
        notes: list[str],
    ) -> None:
        self._step, self._finish = step, finish
        self._changed, self._counters, self._device = changed, counters, device
        self._stream = streams_of(device).fetching
        self._stream.wait_stream(torch.cuda.current_stream(device))  # graph and features may still be on their way
        self._full = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._trained = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._slots: dict[tuple[Hashable, int], BatchSlot] = {}
        # A graph may use the memory of another of its pool for what it needs in between: that of the other buffer must
        # not be touched while it is trained on.
        self._fetch_pools: list[Any] = [None] * BUFFERS
        self._trainings = Recordings()
        self._turn = 0
        self._notes = notes

    @property
    def recorded(self) -> bool:
        """Whether steps are replayed."""
        return any(slot.train is not None and slot.train.recorded for slot in self._slots.values())

    def fetch_ahead(self, batches: Iterable[Batch]) -> Iterator[BatchSlot]:
        """``batches`` in their order, each in its buffer, and the next one on its way when one is handed out.

        Batches are made on the fetching stream, so that their seeds do not wait for training.
        """
        waiting, following = iter(batches), None
        try:
            while True:
                with torch.cuda.stream(self._stream):
                    batch = next(waiting, None)
                    started = None if batch is None else self._fetch(batch)
                if following is not None:
                    yield following
                if started is None:
                    return
                following = started
        except GeneratorExit:  # abandoned early: the batch on its way is not used
            self._stream.synchronize()
            raise

    def _fetch(self, batch: Batch) -> BatchSlot:
        """Fetch ``batch`` into the next buffer, once that is free."""
        buffer, self._turn = self._turn % BUFFERS, self._turn + 1
        self._stream.wait_event(self._trained[buffer])
        slot = self._slots.get((batch.shape, buffer))
        if slot is None:
            slot = self._slots[batch.shape, buffer] = BatchSlot(buffer, batch.static_copy())

            def fetch(slot: BatchSlot = slot) -> None:
                slot.fetched = slot.batch.fetched(slot.buffer)

            slot.fetch = Replay(fetch, self._counters, record=True, pool=self._fetch_pools[buffer])
            self._fetch_pools[buffer] = slot.fetch.pool or self._fetch_pools[buffer]
            if slot.fetch.reason is not None:
                self._notes.append(NOT_CAPTURED.format("sampling and fetching run", slot.fetch.reason))
        else:
            slot.batch.copy_(batch)
        slot.fetch()
        self._full[buffer].record(self._stream)
        return slot

    def train(self, slot: BatchSlot) -> None:
        """Train on a slot of :meth:`fetch_ahead`, on the current stream."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._full[slot.buffer])
        if slot.train is None:
            # Kernels of training go before those of fetching, which wait for PCIe most of the time.
            # What is fetched eagerly is elsewhere every time, so it is also trained on eagerly.
            def step(slot: BatchSlot = slot) -> None:
                slot.own = self._step(slot.batch.built(slot.fetched))

            slot.train = Replay(step, self._changed, record=False, stream=streams_of(self._device).urgent)
            if slot.fetch is not None and slot.fetch.recorded:
                alike = [self._slots.get((slot.batch.shape, buffer)) for buffer in range(BUFFERS)]
                warm = any(other is not None and other.train is not None and other.train.recorded for other in alike)
                self._trainings.add(slot.train, warm=not warm)
            self._notes += [NOT_CAPTURED.format("the step runs", reason) for reason in self._trainings.reasons]
        slot.train()
        self._finish(slot.batch, slot.own)
        self._trained[slot.buffer].record(stream)


class SteppedEpoch:
    """An epoch of several steps of ``stacks``, which share ``source``.

    On a GPU the step is captured once per batch shape, all CUDA graphs in one memory pool, and a batch is copied into
    the graph's own before the replay. If the source says so, the next batch is made meanwhile
    (:class:`OverlappedSteps`). ``run_stack(stack, step)`` makes a call on behalf of a stack; remarks for the user go
    to ``notes``.
    """

    def __init__(
        self, source: Source, stacks: Sequence[Stack], record: bool, run_stack: RunStack, notes: list[str]
    ) -> None:
        self.source, self.stacks = source, list(stacks)
        self._record, self._run_stack, self._notes = record, run_stack, notes
        self._shared = Recordings()
        self._recordings: dict[Hashable, tuple[Batch, Replay]] = {}
        self._overlapped: OverlappedSteps | None = None

    @property
    def recorded(self) -> bool:
        """Whether steps are replayed."""
        if self._overlapped is not None and self._overlapped.recorded:
            return True
        return any(replay.recorded for _, replay in self._recordings.values())

    def batches(self, epoch: int, first: int) -> Iterator[Batch | BatchSlot]:
        """What :meth:`train_on` takes: the batches of ``epoch`` from ``first`` on."""
        batches = self.source.batches(epoch, first)
        if not self._record or not self.source.overlaps:
            return iter(batches)
        if self._overlapped is None:
            counters, device = self.source.counters(), self.stacks[0].device
            self._overlapped = OverlappedSteps(self._step, self._finish, self._changed(), counters, device, self._notes)
        return self._overlapped.fetch_ahead(batches)

    def _changed(self) -> list[Tensor]:
        return [tensor for stack in self.stacks for tensor in stack.state.tensors().values()]

    def end(self, evaluated: bool) -> None:
        """Record the epoch, with an evaluation or without."""
        for stack in self.stacks:
            self._run_stack(stack, partial(stack.end_epoch, evaluated))

    def train_on(self, batch: Batch | BatchSlot) -> None:
        """One step of every stack."""
        if isinstance(batch, BatchSlot):
            self._overlapped.train(batch)
            return
        if self._record and batch.shape is not None:
            if batch.shape not in self._recordings:
                static = batch.static_copy()
                changed = self._changed() + self.source.counters()
                replay = Replay(lambda: self._train_stacks(static.prepared()), changed, record=False)
                # Other threads must not call CUDA during a capture.
                with getattr(self.source, "quiet", nullcontext)():
                    self._shared.add(replay)
                self._notes += [NOT_CAPTURED.format("the step runs", reason) for reason in self._shared.reasons]
                self._recordings[batch.shape] = static, replay
            static, replay = self._recordings[batch.shape]
            if replay.recorded:
                static.copy_(batch)
                replay()
                return
        self._train_stacks(batch.prepared())

    def _train_stacks(self, batch: Batch) -> None:
        self._finish(batch, self._step(batch))

    def _step(self, batch: Batch) -> OwnGradients:
        """A step of every stack; over ranks the gradients of this one alone."""
        own: list[tuple[Tensor, Tensor]] = []
        for stack in self.stacks:
            if self.source.reduce.ranks == 1:
                self._run_stack(stack, partial(stack.train_on, batch))
            else:
                self._run_stack(stack, partial(lambda stack: own.append(stack.own_gradients(batch)), stack))
        return own

    def _finish(self, batch: Batch, own: OwnGradients) -> None:
        """Sum gradients over ranks, and update; nothing on one rank."""
        for stack, gradients in zip(self.stacks, own, strict=False):
            self._run_stack(stack, partial(stack.train_on, batch, gradients))


# ---- Stacks of users' modules that train slower than their members one after another, found by timing their steps.
#
# Torch runs some operators slower for several tasks at once (``vmap``) than for each: a stack of PyG's GATv2 had 0.80
# of the speed of its members alone. On a large graph the rows of one task may stay in a cache that those of several do
# not fit into: no prediction covers them all.

ROUNDS = 3  # the fastest counts
ROUND_SECONDS, MOST_CALLS = 0.01, 20  # per round: enough for a clock, few for training
SLOWER = 0.97  # times what the members take, from which on a stack is not worth it: less is within the noise of steps
WORTH_SECONDS = 0.1  # of the whole training: what takes less is not worth a note
# On a GPU. The optimizer and the records of an epoch are not timed, and a stack has fewer launches of them.
REPLAYED = 1.02
COMPILED = 1.25  # if the step is compiled afterwards, which changes what both take
LEAST_SECONDS = 0.1  # of the whole training, as predicted: about what timing on a GPU takes


class StepTimer:
    """Times the gradients and the evaluation of a stack, and of one member alone, as each would run in training.

    On a CPU that is an eager step. On a GPU it is captured as a CUDA graph and replayed, as an epoch is (``replays``):
    eager steps of small graphs would only show how fast the host launches kernels. A recording takes the memory of a
    step, which is released before anything else is recorded. States and generators are restored after every call.
    ``attempts``: how often to time a stack before it is called slow; ``spent``: seconds that timing took on a GPU.
    """

    def __init__(self, stack: Stack, record: bool) -> None:
        self._stack, self._record = stack, record
        self.replays = stack.device.type != "cpu"
        self.attempts = 2 if self.replays else 3  # a busy CPU makes single steps slower
        self.spent = 0.0

    def alone(self) -> float | None:
        """Seconds of one member of the stack; None if that cannot be measured."""
        step, tried = self._stack.members.alone, self._stack.members.alone_seconds
        if step is None or (tried is None and not self.replays):
            return None
        tensors = list(step.state.tensors().values())
        if self.replays:
            seconds = self._seconds(step, tensors)
            return seconds if math.isfinite(seconds) else None
        return min(tried, *(self._seconds(step, tensors) for _ in range(2)))  # the trial timed it before

    def together(self) -> float:
        """Seconds of all members as one stack; infinite if there is no memory for it."""
        stack, batch = self._stack, self._stack.source.example()

        def step() -> None:
            stack.gradients(stack.state.flat, batch)
            with torch.no_grad():
                stack.logits(stack.state.flat, batch)

        return self._seconds(step, list(stack.state.tensors().values()))

    def _seconds(self, step: Callable[[], None], changed: list[Tensor]) -> float:
        device, begin, seconds = self._stack.device, time.perf_counter(), math.inf
        replay: Replay | None = None
        if not self.replays:
            with same_draws(device), restored(changed):
                begin = step_seconds()
                step()
                return step_seconds() - begin
        try:
            with same_draws(device), restored(changed):
                replay = Replay(step, changed, record=self._record)
                self._round(replay, 1)  # the first one moves the graph to the device
                calls = max(1, min(MOST_CALLS, int(ROUND_SECONDS / max(self._round(replay, 1), 1e-6))))
                seconds = min(self._round(replay, calls) for _ in range(ROUNDS))
        except torch.OutOfMemoryError:
            pass  # as planned it may fit: nothing else is in memory then
        replay = None
        if device.type == "cuda":
            torch.cuda.empty_cache()  # only here nothing holds the recording or a failed attempt
        self.spent += time.perf_counter() - begin
        return seconds

    def _round(self, replay: Replay, calls: int) -> float:
        """Mean seconds of ``calls`` in a row."""
        device = self._stack.device
        wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else bool
        wait()
        begin = time.perf_counter()
        for _ in range(calls):
            replay()
        wait()
        return (time.perf_counter() - begin) / calls


def slower_than_alone(stack: Stack, plan: Plan) -> str | None:
    """Why ``stack`` should be taken apart, in words; None if it should not, or if that cannot be measured."""
    members, epochs = len(stack.tasks), max(task.epochs for task in stack.tasks)
    whole = stack.source.constant and stack.source.reduce.ranks == 1
    if members < 2 or not stack.members.is_users or not is_timed(plan, whole, epochs):
        return None
    timer = StepTimer(stack, plan.replay)
    member = timer.alone()
    if member is None or members * member * epochs < timer.spent:
        return None
    alone, together = members * member, math.inf
    for _ in range(timer.attempts):
        together = min(together, timer.together())
        if together <= most_seconds(alone, epochs, plan) or math.isinf(together):
            return None
    return f"a step of the stack takes {together * 1e3:.3g} ms, the steps of its members {alone * 1e3:.3g} ms"


def is_timed(plan: Plan, whole: bool, epochs: int) -> bool:
    """Whether timing a stack of ``plan`` can repay: on a GPU not for trainings that are shorter than that.

    Nor if batches are sampled, which the members of a stack share: only steps are timed.
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
