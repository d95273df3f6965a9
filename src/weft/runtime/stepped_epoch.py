"""SteppedEpoch: an epoch of several steps, each on a batch of its own.

On a GPU the step is captured once per batch shape, all CUDA graphs in one memory pool, and a batch is copied into the
graph's own before the replay. Where batches say so, the next one is made meanwhile
(:mod:`weft.runtime.overlapped_steps`). If the source is constant, a whole epoch is one CUDA graph instead
(:class:`weft.runtime.group.GroupRun`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext

from torch import Tensor

from weft.runtime.batches.source import Batch, Source
from weft.runtime.device.cuda_graph import Recordings, Replay
from weft.runtime.overlapped_steps import OverlappedSteps, Slot
from weft.runtime.step.stack import Stack

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
