"""OverlappedSteps: sample and fetch the next batch on a stream of its own while the current one trains.

There are two buffers. A batch is fetched into one of them by a CUDA graph on the fetching stream, while the batch in
the other is trained on by another CUDA graph on the caller's stream:

    fetching stream   | fetch 0 | fetch 1 |   fetch 2   |   fetch 3   | ...
    caller's stream             | train 0 | train 1     | train 2     | ...

Events order them: training waits until its buffer is full, fetching until the batch before in its buffer is trained on.
Training and each buffer's fetching have memory pools of their own. The result is that of one step after another: a
batch depends on its seeds and clock alone, and training on batches in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.runtime.batches.source import Batch
from weft.runtime.device.cuda_graph import Recordings, Replay
from weft.runtime.device.streams import fetching_stream, urgent_stream

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
