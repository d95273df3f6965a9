"""One epoch of all stacks of a group: in turn, concurrent, merged into one step, or compiled, as the plan says."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.batches.source import Batch, Source
from weft.core.errors import InputError
from weft.core.plan import Plan
from weft.runtime.device.cuda_graph import Recordings, Replay
from weft.runtime.device.process import OwnGenerator
from weft.runtime.device.streams import ConcurrentSteps, Steps, fetching_stream, in_turn, urgent_stream
from weft.runtime.step.stack import Stack


class MergedStep(Protocol):
    """One epoch of several stacks as one merged step."""

    stacks: tuple[Stack, ...]

    def __call__(self) -> None:
        """Train one epoch, evaluate and record the outcome."""

    def without_evaluation(self) -> None:
        """Train one epoch and record only its training losses."""


class StepMerger(Protocol):
    """Merges the steps of stacks; the engine supplies one for plans that need it (``weft.weave``)."""

    def merge(self, stacks: Sequence[Stack]) -> Any:
        """The merged step; raises InputError if the stacks cannot be merged."""

    def observe(self, step: Any, observer: Any, streams: bool) -> None:
        """Report the merged step to a dry run."""


class GroupStep:
    """The step of ``stacks``, a list that the group may shorten; remarks for the user go to ``notes``.

    ``own_random`` has the generators of stacks (by id) with a generator of their own.
    """

    def __init__(
        self,
        stacks: list[Stack],
        plan: Plan,
        device: torch.device,
        merger: StepMerger | None,
        own_random: dict[int, OwnGenerator],
        notes: list[str],
    ) -> None:
        self._stacks, self._plan, self._device, self._merger = stacks, plan, device, merger
        self._own_random, self._notes = own_random, notes
        self.merged: MergedStep | None = None  # the merged step of several stacks, once it is prepared
        at_once = plan.join == "concurrent" and device.type == "cuda"
        self.run_steps: Callable[[Steps], None] = ConcurrentSteps(device) if at_once else in_turn
        self._built: set[bool] = set()  # kinds of steps, with and without evaluation, that have run before
        self._refused: set[int] = set()  # stacks that failed to compile: not tried again

    def evaluated(self) -> None:
        """One epoch of every stack with its evaluation, as it is captured."""
        if self.merged is not None:
            self.merged()
        self._each([partial(self.in_own_random, stack, stack) for stack in self._apart()], evaluated=True)

    def without_evaluation(self) -> None:
        """One epoch of every stack that records only the training losses."""
        if self.merged is not None:
            self.merged.without_evaluation()
        steps = [partial(self.in_own_random, stack, stack.without_evaluation) for stack in self._apart()]
        self._each(steps, evaluated=False)

    def _each(self, steps: Steps, evaluated: bool) -> None:
        """Steps of stacks, concurrent if the plan says so; the first time in turn, since they build shared data."""
        go = self.run_steps if evaluated in self._built and len(steps) > 1 else in_turn
        go(steps)
        self._built.add(evaluated)

    def _apart(self) -> list[Stack]:
        """The stacks whose steps are not merged with others."""
        return [stack for stack in self._stacks if self.merged is None or stack not in self.merged.stacks]

    def in_own_random(self, stack: Stack, step: Callable[[], None]) -> None:
        own = self._own_random.get(id(stack))
        if own is None:
            step()
        else:
            with own:
                step()

    def rebuild(self) -> None:
        """Run the next step in turn: a stack has changed, and builds shared data again."""
        self._built.clear()

    # ---- merging and compiling -----------------------------------------------------------------------

    def merge(self) -> None:
        """Merge the steps of several stacks into one if the plan says so; if that fails, a note says why.

        The merged step is checked against the stacks' own; if it fails, training goes on without it, with a note.
        """
        stacks = [stack for stack in self._stacks if id(stack) not in self._own_random and stack.eager is None]
        if self._plan.join != "woven" or len(stacks) < 2 or self.merged is not None:
            return
        try:
            if self._merger is None:
                raise InputError("this run has no step merger")
            self.merged = self._merger.merge(stacks)
        except torch.OutOfMemoryError:
            raise
        except Exception as reason:
            what = str(reason) if isinstance(reason, InputError) else f"{type(reason).__name__}: {reason}"
            self._notes.append(f"{len(stacks)} stacks train side by side, not as one step: {what.splitlines()[0]}")

    def observe_merged(self, observer: Any) -> None:
        """Report the merged step, if there is one, to a dry run."""
        if self.merged is not None and self._merger is not None:
            self._merger.observe(self.merged, observer, streams=self._plan.device == "cuda")

    def compile(self, skips_evaluations: bool) -> None:
        """Compile the steps of stacks with Inductor if the plan says so; if that fails, a note says why."""
        if not self._plan.compiled or self.merged is not None:
            return
        from weft.runtime.compile import compile_stack  # brings in torch's compilers

        for stack in self._stacks:
            if id(stack) in self._refused:
                continue
            try:
                self.in_own_random(stack, partial(compile_stack, stack, skips_evaluations))
            except (InputError, torch.OutOfMemoryError) as reason:
                what = "memory ran out" if isinstance(reason, torch.OutOfMemoryError) else str(reason)
                self._note_once(f"the step is not compiled: {what}")
                self._refused.add(id(stack))

    def as_written(self, note: str) -> None:
        """Continue without the compiled functions."""
        for stack in self._stacks:
            stack.as_written()
        self._note_once(note)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _note_once(self, note: str) -> None:
        if note not in self._notes:
            self._notes.append(note)


# ---- OverlappedSteps: sample and fetch the next batch on a stream of its own while the current one trains.
#
# There are two buffers. A batch is fetched into one of them by a CUDA graph on the fetching stream, while the batch in
# the other is trained on by another CUDA graph on the caller's stream:
#
#     fetching stream   | fetch 0 | fetch 1 |   fetch 2   |   fetch 3   | ...
#     caller's stream             | train 0 | train 1     | train 2     | ...
#
# Events order them: training waits until its buffer is full, fetching until the batch before in its buffer is trained
# on.
# Training and each buffer's fetching have memory pools of their own. The result is that of one step after another: a
# batch depends on its seeds and clock alone, and training on batches in their order.

PLACES = 2  # buffers


@dataclass
class Slot:
    """A batch of one shape in one of the buffers: its inputs ``mine``, what is fetched, and the two CUDA graphs."""

    place: int
    mine: Batch
    fetched: Any = None
    fetch: Replay | None = None
    train: Replay | None = None


class OverlappedSteps:
    """``step(batch)`` trains on a built batch and writes ``changed``; ``counters`` are written by fetching."""

    def __init__(
        self, step: Callable[[Batch], None], changed: list[Tensor], counters: list[Tensor], device: torch.device
    ) -> None:
        self._step, self._changed, self._counters, self._device = step, changed, counters, device
        self._stream = fetching_stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # graph and features may still be on their way
        self._full = [torch.cuda.Event() for _ in range(PLACES)]
        self._trained = [torch.cuda.Event() for _ in range(PLACES)]
        self._slots: dict[tuple[Hashable, int], Slot] = {}
        # A graph may use the memory of another of its pool for what it needs in between: that of the other buffer must
        # not be touched while it is trained on.
        self._fetch_pools: list[Any] = [None] * PLACES
        self._trainings = Recordings()
        self._turn = 0
        self.notes: list[str] = []

    @property
    def recorded(self) -> bool:
        """Whether steps are replayed."""
        return any(slot.train is not None and slot.train.recorded for slot in self._slots.values())

    def fetch_ahead(self, batches: Iterable[Batch]) -> Iterator[Slot]:
        """``batches`` in their order, each in its buffer, and the next one on its way when one is handed out.

        Batches are asked for on the fetching stream, so that their seeds do not wait for training.
        """
        waiting, following = iter(batches), None
        try:
            while (batch := self._next(waiting)) is not None:
                started = self._start(batch)
                if following is not None:
                    yield following
                following = started
            if following is not None:
                yield following
        except GeneratorExit:  # left early: nobody waits for the batch on its way
            self._stream.synchronize()
            raise

    def _next(self, batches: Iterator[Batch]) -> Batch | None:
        with torch.cuda.stream(self._stream):
            return next(batches, None)

    def _start(self, batch: Batch) -> Slot:
        """Fetch ``batch`` into the next buffer, once that is free."""
        place, self._turn = self._turn % PLACES, self._turn + 1
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._trained[place])
            slot = self._slots.get((batch.shape, place))
            if slot is None:
                slot = self._slots[batch.shape, place] = Slot(place, batch.static_copy())
                self._record_fetch(slot)
            else:
                slot.mine.copy_(batch)
            assert slot.fetch is not None
            slot.fetch()
            self._full[place].record(self._stream)
        return slot

    def _record_fetch(self, slot: Slot) -> None:
        def fetch() -> None:
            slot.fetched = slot.mine.fetched(slot.place)

        slot.fetch = Replay(fetch, self._counters, record=True, pool=self._fetch_pools[slot.place])
        self._fetch_pools[slot.place] = slot.fetch.pool or self._fetch_pools[slot.place]
        self._note("sampling and fetching run", slot.fetch.reason)

    def train(self, slot: Slot) -> None:
        """Train on a slot of :meth:`fetch_ahead`, on the current stream."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._full[slot.place])
        if slot.train is None:
            self._record_training(slot)
        assert slot.train is not None
        slot.train()
        self._trained[slot.place].record(stream)

    def _record_training(self, slot: Slot) -> None:
        def train() -> None:
            self._step(slot.mine.built(slot.fetched))

        # Kernels of training go before those of fetching, which wait for PCIe most of the time.
        # What is fetched eagerly is elsewhere every time, so it is also trained on eagerly.
        slot.train = Replay(train, self._changed, record=False, stream=urgent_stream(self._device))
        if slot.fetch is not None and slot.fetch.recorded:
            alike = (self._slots.get((slot.mine.shape, place)) for place in range(PLACES))
            known = any(one is not None and one.train is not None and one.train.recorded for one in alike)
            self._trainings.add(slot.train, warm=not known)
        for reason in self._trainings.reasons:
            self._note("the step runs", reason)

    def _note(self, what: str, reason: str | None) -> None:
        note = f"{what} eagerly: it could not be captured as a CUDA graph ({reason})"
        if reason and note not in self.notes:
            self.notes.append(note)


# ---- SteppedEpoch: an epoch of several steps, each on a batch of its own.
#
# On a GPU the step is captured once per batch shape, all CUDA graphs in one memory pool, and a batch is copied into
# the
# graph's own before the replay. Where batches say so, the next one is made meanwhile
# (:mod:`weft.runtime.epoch`). If the source is constant, a whole epoch is one CUDA graph instead
# (:class:`weft.runtime.group.GroupRun`).

RunStack = Callable[[Stack, Callable[[], None]], None]


class SteppedEpoch:
    """Steps of ``stacks``, which share ``source``; ``run_stack(stack, step)`` makes a call on behalf of a stack."""

    def __init__(self, source: Source, stacks: Sequence[Stack], record: bool, run_stack: RunStack) -> None:
        self.source, self.stacks = source, list(stacks)
        self._record, self._run_stack, self._shared = record, run_stack, Recordings()
        self._recordings: dict[Hashable, tuple[Batch, Replay]] = {}
        self._notes: list[str] = []
        self._overlapped: OverlappedSteps | None = None

    @property
    def notes(self) -> list[str]:
        """Remarks for the user."""
        return self._notes + ([] if self._overlapped is None else self._overlapped.notes)

    @property
    def recorded(self) -> bool:
        """Whether steps are replayed."""
        if self._overlapped is not None and self._overlapped.recorded:
            return True
        return any(replay.recorded for _, replay in self._recordings.values())

    def batches(self, epoch: int, first: int) -> Iterator[Batch | Slot]:
        """What :meth:`train_on` takes: the batches of ``epoch`` from ``first`` on."""
        found = self.source.batches(epoch, first)
        if not self._record or not self.source.overlaps:
            return iter(found)
        if self._overlapped is None:
            about = (self._changed(), self.source.counters(), self.stacks[0].device)
            self._overlapped = OverlappedSteps(self._train_stacks, *about)
        return self._overlapped.fetch_ahead(found)

    def _changed(self) -> list[Tensor]:
        return [tensor for stack in self.stacks for tensor in stack.state.tensors().values()]

    def end(self, evaluated: bool) -> None:
        """Record the epoch, with an evaluation or without."""
        for stack in self.stacks:
            self._run_stack(stack, lambda stack=stack: stack.end_epoch(evaluated))  # type: ignore[misc]

    def train_on(self, batch: Batch | Slot) -> None:
        """One step of every stack."""
        if isinstance(batch, Slot):
            assert self._overlapped is not None
            self._overlapped.train(batch)
            return
        if not self._record or batch.shape is None:
            self._step(batch)
            return
        if batch.shape not in self._recordings:
            self._recordings[batch.shape] = self._recording(batch)
        mine, replay = self._recordings[batch.shape]
        if replay.recorded:
            mine.copy_(batch)
            replay()
        else:
            self._step(batch)

    def _step(self, batch: Batch) -> None:
        self._train_stacks(batch.prepared())

    def _train_stacks(self, batch: Batch) -> None:
        for stack in self.stacks:
            self._run_stack(stack, lambda stack=stack: stack.train_on(batch))  # type: ignore[misc]

    def _recording(self, batch: Batch) -> tuple[Batch, Replay]:
        mine = batch.static_copy()
        changed = self._changed() + self.source.counters()
        quiet = getattr(self.source, "quiet", nullcontext)  # other threads must not call CUDA during a capture
        replay = Replay(lambda: self._step(mine), changed, record=False)
        with quiet():
            self._shared.add(replay)
        for reason in self._shared.reasons:
            note = f"the step runs eagerly: it could not be captured as a CUDA graph ({reason})"
            self._notes += [note] if note not in self._notes else []
        return mine, replay


def train_epoch(epochs: Sequence[SteppedEpoch], epoch: int, first: int, stop: Callable[[], bool]) -> int:
    """Steps of ``epoch`` from ``first`` on, all sources in lockstep, until ``stop()``; returns the steps done."""
    done = first
    for batches in zip(*(one.batches(epoch, first) for one in epochs), strict=True):
        for one, batch in zip(epochs, batches, strict=True):
            one.train_on(batch)
        done += 1
        if done < epochs[0].source.steps_per_epoch and stop():
            break
    return done


def stepped_epochs(stacks: Sequence[Stack], record: bool, run_stack: RunStack) -> list[SteppedEpoch]:
    """One for every source of ``stacks``."""
    by_source: dict[int, list[Stack]] = {}
    for stack in stacks:
        by_source.setdefault(id(stack.source), []).append(stack)
    return [SteppedEpoch(some[0].source, some, record, run_stack) for some in by_source.values()]


def all_constant(stacks: Sequence[Stack]) -> bool:
    """Whether every stack has the same batch in every step."""
    return all(stack.source.constant for stack in stacks)
