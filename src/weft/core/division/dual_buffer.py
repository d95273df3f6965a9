"""DualBuffer: decide what host, bus and device do next with the batches of an epoch (MorphGL's Algorithms 1 to 4).

Two buffers: prepared batches in host memory, and batches on the device. An *overlap* has three phases. Filling: the
device prepares its batches of the overlap, the host its own. Blocking: one side is late, and the other goes on instead
of idling. Flushing: batches are trained while the bus carries those of the host to the device.

Unlike MorphGL, batches are trained in their order: an overlap begins with the device's batches and ends with the
host's, and only batches less than ``device_buffer`` ahead of the one to be trained may be on the device, so the next
one always has a place there. The same object drives the simulator and the executor; it reads no clock.

Towards the end of an epoch an elastic division's host would be idle. It goes on with the batches of the next one, which
wait in its buffer: places behind the last of this epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from weft.core.division.claims import Claims
from weft.core.division.division import Division
from weft.core.errors import SpecError


class State(Enum):
    """Where a batch is."""

    WAITING = 0
    ON_HOST = 1  # in work there
    IN_HOST_BUFFER = 2
    ON_BUS = 3
    ON_DEVICE = 4  # in preparation there
    READY = 5
    TRAINED = 6  # or in training


@dataclass
class Blocking:
    """How often a side was late at the end of filling, and how many batches changed sides."""

    host_late: int = 0
    device_late: int = 0
    taken_over: int = 0


class DualBuffer:
    """The state of ``batches`` batches under ``division``; methods that begin something return None to wait.

    ``seconds``: of the phases of an elastic division, as earlier epochs left them. ``upcoming``: batches of the epoch
    after this one, which the host may begin if the division is elastic.
    """

    def __init__(
        self, division: Division, batches: int, seconds: Mapping[str, float] | None = None, upcoming: int = 0
    ) -> None:
        self.division, self.batches = division, batches
        self.upcoming = upcoming if division.elastic else 0
        self.blocking = Blocking()
        self._state = [State.WAITING] * (batches + self.upcoming)
        self.claims = _claims(division, seconds or {}) if division.elastic else None
        self._by_device = [division.elastic or division.on_device(place) for place in range(len(self._state))]
        self._next_host = self._next_device = 0  # no batch of that side before it is waiting
        self._trained = 0
        self._held = 0  # by the host: in work or in its buffer
        self._filling = not division.alternates

    @property
    def finished(self) -> bool:
        """Whether every batch is trained, or in training."""
        return self._trained == self.batches

    def following(self, upcoming: int = 0) -> DualBuffer:
        """Of an elastic division: the schedule of the epoch after this one, with what the host has begun of it."""
        assert self.claims is not None
        found = DualBuffer(self.division, self.upcoming, self.claims.seconds, upcoming)
        assert found.claims is not None
        for place, state in enumerate(self._state[self.batches :]):
            if state is not State.WAITING:
                found._state[place], found._by_device[place] = state, False
                found._held += 1
        found.claims.follow(self.claims, self.batches)
        return found

    @property
    def phase(self) -> str:
        """``"filling"`` or ``"flushing"``."""
        return "filling" if self._filling else "flushing"

    def state(self, batch: int) -> State:
        """Where ``batch`` is."""
        return self._state[batch]

    def prepared_by_device(self, batch: int) -> bool:
        """Whether the device prepares ``batch``, or has taken it over."""
        return self._by_device[batch]

    # ---- the host ------------------------------------------------------------------------------------

    def begin_on_host(self) -> int | None:
        """The next batch for a free worker; None if the buffer is full or none is left."""
        if self._held >= self.division.host_buffer:
            return None
        place = self._advance_host()
        if place is None:
            return None
        if self.claims is not None:
            self.claims.begun(place, self._trained)
            self._by_device[place] = False
        self._state[place] = State.ON_HOST
        self._held += 1
        return place

    @property
    def host_has_work(self) -> bool:
        """Whether a batch of the host's has not begun."""
        return self._advance_host() is not None

    def _advance_host(self) -> int | None:
        if self.claims is not None:
            places = range(self.claims.next(self._trained), len(self._state))
            return next((place for place in places if self._state[place] is State.WAITING), None)
        while self._next_host < self.batches:
            place = self._next_host
            if not self._by_device[place] and self._state[place] is State.WAITING:
                return place
            self._next_host += 1
        return None

    def finished_on_host(self, batch: int) -> None:
        """The host has prepared ``batch``."""
        self._move(batch, State.ON_HOST, State.IN_HOST_BUFFER)

    # ---- the bus -------------------------------------------------------------------------------------

    def begin_transfer(self) -> int | None:
        """The first batch of the host's buffer that has a place on the device."""
        place = self.next_transfer()
        if place is not None:
            self._state[place] = State.ON_BUS
            self._held -= 1
        return place

    def next_transfer(self) -> int | None:
        """What :meth:`begin_transfer` would begin."""
        places = range(self._trained, self._window())
        return next((place for place in places if self._state[place] is State.IN_HOST_BUFFER), None)

    def finished_transfer(self, batch: int) -> None:
        """``batch`` has arrived on the device."""
        self._move(batch, State.ON_BUS, State.READY)

    # ---- the device ----------------------------------------------------------------------------------

    def next_on_device(self) -> tuple[str, int] | None:
        """``("prepare", batch)`` or ``("train", batch)``; None: wait for the host or the bus. Nothing is begun."""
        if self.finished:
            return None
        if self.division.beside:
            return ("train", self._trained) if self._state[self._trained] is State.READY else None
        if self.division.in_step:
            return self._in_step()
        own = self._next_own()
        if self._filling and own is not None:
            return "prepare", own
        if self._state[self._trained] is State.READY:
            return "train", self._trained
        return self._while_blocked(own)

    def _in_step(self) -> tuple[str, int] | None:
        """Nothing ahead: prepare the next batch if it is the device's, or the host has not begun it."""
        batch = self._trained
        if self._state[batch] is State.READY:
            return "train", batch
        mine = self._by_device[batch] or self.division.takes_over
        return ("prepare", batch) if mine and self._state[batch] is State.WAITING else None

    def next_beside(self) -> int | None:
        """The batch that the device is to prepare beside training; None: wait. Nothing is begun."""
        if self.finished:
            return None
        own = self._next_own()
        if own is not None or self._state[self._trained] is State.READY:
            return own
        blocked = self._while_blocked(None)
        return None if blocked is None else blocked[1]

    @property
    def device_has_work(self) -> bool:
        """Whether a batch waits that the device prepares, or may take over."""
        waiting = range(self._trained, self.batches)
        takes_over = self.division.takes_over
        return any(self._state[p] is State.WAITING and (takes_over or self._by_device[p]) for p in waiting)

    def _while_blocked(self, own: int | None) -> tuple[str, int] | None:
        """The next batch is not there: prepare ahead, or take over one that the host has not begun."""
        if own is not None:
            return "prepare", own
        waits_for_bus = self._state[self._trained] in (State.IN_HOST_BUFFER, State.ON_BUS)
        taken = None if waits_for_bus or not self.division.takes_over else self._next_to_take_over()
        return None if taken is None else ("prepare", taken)

    def begin_on_device(self, action: str, batch: int) -> None:
        """Begin what :meth:`next_on_device` answered."""
        if action == "train":
            self._move(batch, State.READY, State.TRAINED)
            self._end_filling()
            self._trained += 1
            self._filling = not self.division.alternates and self._is_own_waiting(self._trained)
            return
        if not self._by_device[batch]:
            self._by_device[batch] = True
            self.blocking.taken_over += 1
        self._move(batch, State.WAITING, State.ON_DEVICE)

    def finished_on_device(self, batch: int) -> None:
        """The device has prepared ``batch``."""
        self._move(batch, State.ON_DEVICE, State.READY)

    def _end_filling(self) -> None:
        """Once per overlap: note which side was late."""
        if self._filling and self.division.divided:
            full = min(self.division.host_batches, self.division.host_buffer)
            late = self._held < min(full, self._left_of_host())
            waits = self._held >= self.division.host_buffer and self.host_has_work
            self.blocking.host_late += late
            self.blocking.device_late += waits
        self._filling = False

    def _left_of_host(self) -> int:
        last = min(self._trained + self.division.overlap, self.batches)
        return sum(not self._by_device[place] for place in range(self._trained, last))

    def _next_own(self) -> int | None:
        """The device's first batch that waits and has a place."""
        while self._next_device < self._window():
            if self._is_own_waiting(self._next_device):
                return self._next_device
            self._next_device += 1
        return None

    def _next_to_take_over(self) -> int | None:
        places = range(max(self._next_host, self._trained), self._window())
        return next((place for place in places if self._state[place] is State.WAITING), None)

    def _is_own_waiting(self, place: int) -> bool:
        return place < self.batches and self._by_device[place] and self._state[place] is State.WAITING

    def _window(self) -> int:
        """Batches before this one may be on the device. Those of the device's own steps are not there ahead of them."""
        if not self.division.in_step:
            return min(self._trained + self.division.device_buffer, self.batches)
        room = self.division.device_buffer
        for place in range(self._trained, self.batches):
            room -= not self._by_device[place]
            if room < 0:
                return place
        return self.batches

    def _move(self, batch: int, before: State, after: State) -> None:
        if self._state[batch] is not before:
            raise SpecError(f"batch {batch} is {self._state[batch].name.lower()}, not {before.name.lower()}")
        self._state[batch] = after

    def took(self, phase: str, seconds: float) -> None:
        """A phase of a batch took so long (:mod:`weft.core.division.claims`); nothing comes of it unless elastic."""
        if self.claims is not None:
            self.claims.took(phase, seconds)


def _claims(division: Division, seconds: Mapping[str, float]) -> Claims:
    return Claims(division.workers, division.overlap / division.host_batches, float(division.lead), dict(seconds))
