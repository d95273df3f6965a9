"""Where things lie in one buffer of a device's memory: inputs from its low end, a group's own state from its high end.

CoGNN keeps parameters at one end of a pool and what is computed at the other, so that the memory of a group is whole
again when the group ends. Here what is copied to the device before a group starts (graphs, weights) comes from the low
end, and what a group writes (weights in training, moments, history) from the high end. Every place begins at a multiple
of 512 bytes. The first ``reserved`` bytes are never given.

Plain numbers: nothing here touches a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ALIGNMENT = 512
LOW, HIGH = "low", "high"


def padded(size: int) -> int:
    """``size`` bytes as the pool counts them."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Place:
    """Bytes from ``offset`` on that belong to ``owner``; ``size`` is padded."""

    offset: int
    size: int
    owner: str
    end: str

    @property
    def stop(self) -> int:
        """The first byte behind it."""
        return self.offset + self.size


@dataclass(frozen=True)
class Move:
    """Bytes of an owner that go from one offset to another."""

    source: int
    target: int
    size: int


@dataclass
class TwoEndedPool:
    """Places in ``capacity`` bytes; a place that does not fit is None, never one somewhere else."""

    capacity: int
    reserved: int = 0
    _places: list[Place] = field(default_factory=list)  # by offset

    def __post_init__(self) -> None:
        if not 0 <= self.reserved <= self.capacity:
            raise ValueError(f"reserved={self.reserved} must be from 0 to capacity={self.capacity}")

    def put(self, owner: str, size: int, end: str = LOW) -> Place | None:
        """A place of ``size`` bytes: in the lowest hole that is large enough, or at the top of the highest."""
        needed, holes = padded(max(size, 1)), self.holes()
        hole = next((one for one in (holes if end == LOW else holes[::-1]) if one[1] - one[0] >= needed), None)
        if hole is None:
            return None
        found = Place(hole[0] if end == LOW else hole[1] - needed, needed, owner, end)
        self._places.append(found)
        self._places.sort(key=lambda place: place.offset)
        return found

    def clear(self, owner: str) -> int:
        """Give back every place of ``owner``; their bytes."""
        given_back = self.held(owner)
        self._places = [place for place in self._places if place.owner != owner]
        return given_back

    def pack(self, owner: str) -> list[Move]:
        """Put the places of ``owner`` anew, each as near to its end as it can be, and say what has to be moved.

        In the order given no move overwrites what a later one reads.
        """
        own = [place for place in self._places if place.owner == owner]
        self.clear(owner)
        moves: list[Move] = []
        for old in [p for p in own if p.end == LOW] + [p for p in own[::-1] if p.end == HIGH]:
            new = self.put(owner, old.size, old.end)
            assert new is not None  # its own old place is free
            if new.offset != old.offset:
                moves.append(Move(old.offset, new.offset, old.size))
        return moves

    def holes(self) -> list[tuple[int, int]]:
        """The free parts, each as its first byte and the first one behind it, by offset."""
        found, at = [], padded(self.reserved)
        for place in self._places:
            if place.offset > at:
                found.append((at, place.offset))
            at = place.stop
        last = self.capacity - self.capacity % ALIGNMENT
        return [*found, (at, last)] if last > at else found

    def held(self, owner: str) -> int:
        """Bytes of ``owner``."""
        return sum(place.size for place in self._places if place.owner == owner)

    @property
    def free(self) -> int:
        """Bytes that nobody has."""
        return sum(stop - start for start, stop in self.holes())

    @property
    def places(self) -> tuple[Place, ...]:
        """All places, by offset."""
        return tuple(self._places)
