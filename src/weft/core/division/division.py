"""Division: how the batches of an epoch are divided between the host and the trainer, and the buffers between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from weft.core.batches.buckets import MOST_BUCKETS
from weft.core.errors import SpecError


@dataclass(frozen=True)
class Division:
    """Overlaps of batches: ``device_batches`` that the trainer prepares itself, then ``host_batches`` of the host.

    ``workers`` threads of the host prepare batches; ``host_buffer``: how many the host may have begun and not yet
    handed to the bus; ``device_buffer``: how many may lie on the device ahead of the one that is trained.
    ``takes_over``: the trainer may prepare a batch that the host has not begun, rather than idle. ``trainer``: the
    hardware that trains. ``beside``: it prepares while it trains, so that there are no phases of filling and flushing,
    and the batches of the two sides alternate. ``in_step``: it prepares each of its batches right before it trains on
    it, in one step with that, and none ahead; they alternate, too. ``lead``: the first batches of an epoch are the
    device's, while the host works on its first ones. ``elastic``: which side prepares a batch is decided during
    training (:mod:`weft.core.division.claims`; only with ``in_step``): the numbers of batches are what is expected, and
    ``lead`` how far ahead the host begins at first. ``buckets``: how many sizes the batches of captured steps are
    padded to (:mod:`weft.core.batches.buckets`).

    Batches are trained in their order whoever prepares them, so a division changes no number.
    """

    host_batches: int
    device_batches: int
    workers: int = 1
    host_buffer: int = 0
    device_buffer: int = 0
    takes_over: bool = False
    trainer: str = "gpu"
    beside: bool = False
    buckets: int = 1
    in_step: bool = False
    lead: int = 0
    elastic: bool = False

    def __post_init__(self) -> None:
        for name, low in (("host_batches", 0), ("device_batches", 0), ("workers", 1), ("lead", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise SpecError(f"division: {name}={value!r} must be a whole number, at least {low}")
        if isinstance(self.buckets, bool) or self.buckets not in range(1, MOST_BUCKETS + 1):
            raise SpecError(f"division: buckets={self.buckets!r} must be a whole number from 1 to {MOST_BUCKETS}")
        if not self.host_batches + self.device_batches:
            raise SpecError("division: host_batches and device_batches are both 0; one side has to prepare batches")
        if self.beside and self.in_step:
            raise SpecError("division: beside and in_step exclude each other; batches are prepared in one way")
        if self.elastic and not self.in_step:
            raise SpecError("division: elastic needs in_step; the device prepares what the host has not begun")
        host = self.host_buffer or max(self.workers, self.host_batches)
        object.__setattr__(self, "host_buffer", host if self.host_batches else 0)
        object.__setattr__(self, "device_buffer", self.device_buffer or max(self.device_batches, 1))
        object.__setattr__(self, "takes_over", self.takes_over and self.divided)
        object.__setattr__(self, "lead", self.lead if self.divided else 0)
        object.__setattr__(self, "elastic", self.elastic and self.divided)

    @property
    def overlap(self) -> int:
        """Batches of one overlap."""
        return self.host_batches + self.device_batches

    @property
    def divided(self) -> bool:
        """Whether both sides prepare batches."""
        return self.host_batches > 0 and self.device_batches > 0

    @property
    def alternates(self) -> bool:
        """Whether the batches of the two sides alternate, rather than follow one another within an overlap."""
        return self.beside or self.in_step

    @property
    def device_share(self) -> float:
        """Share of the batches that the trainer prepares itself."""
        return self.device_batches / self.overlap

    @property
    def pinned_batches(self) -> int:
        """The most prepared batches in pinned memory at once: the host's buffer and one on its way."""
        return self.host_buffer + 1 if self.host_batches else 0

    @property
    def kind(self) -> str:
        """``"pipeline"`` (the host prepares all batches), ``"sequential"`` (the device does) or ``"dual buffer"``."""
        return "dual buffer" if self.divided else "pipeline" if self.host_batches else "sequential"

    def on_device(self, place: int) -> bool:
        """Whether the trainer prepares the batch at ``place``, counted from the first of this run."""
        if place < self.lead:
            return True
        place -= self.lead
        if not self.alternates:
            return place % self.overlap < self.device_batches
        before, after = (one * self.device_batches // self.overlap for one in (place, place + 1))
        return after > before

    def words(self) -> str:
        """In words, for a plan."""
        return self._who() + (f"; batches padded to one of {self.buckets} sizes" if self.buckets > 1 else "")

    def _who(self) -> str:
        if not self.device_batches:
            return f"the host prepares all batches with {self.workers} workers (plain pipeline)"
        if not self.host_batches:
            return f"the {self.trainer} prepares all batches"
        if self.elastic:
            return (
                f"the host prepares as many batches with {self.workers} workers as are done in time, about "
                f"{self.host_batches} of {self.overlap}, and the {self.trainer} the others inside of its steps; "
                f"buffers of {self.host_buffer} and {self.device_buffer}"
            )
        how = " inside of its steps" if self.in_step else " beside training" if self.beside else ""
        first = f"; the first {self.lead} of an epoch are the {self.trainer}'s" if self.lead else ""
        return (
            f"of every {self.overlap} batches the {self.trainer} prepares {self.device_batches}{how} and the host "
            f"{self.host_batches} with {self.workers} workers; buffers of {self.host_buffer} and {self.device_buffer}"
            f"{first}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Division:
        """The inverse of :meth:`to_dict`; unknown keys are ignored, so that older versions can read newer files."""
        known = {one.name for one in fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in known})
