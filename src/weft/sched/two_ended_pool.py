"""Allocate ranges of one buffer of a device's memory: inputs from its low end, a group's state from its high end.

CoGNN keeps parameters at one end of a pool and what is computed at the other, so that the memory of a group is whole
again when the group ends. Here what is copied to the device before a group starts (graphs, weights) comes from the low
end, and what a group writes (weights in training, moments, history) from the high end. Every range begins at a
multiple of 512 bytes.

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
class PoolRange:
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
    """Ranges in ``capacity`` bytes."""

    capacity: int
    _ranges: list[PoolRange] = field(default_factory=list)  # by offset

    def put(self, owner: str, size: int, end: str = LOW) -> PoolRange | None:
        """A range of ``size`` bytes: in the lowest hole that is large enough, or at the top of the highest.

        None if it does not fit.
        """
        needed, holes = padded(max(size, 1)), self.holes()
        for start, stop in holes if end == LOW else holes[::-1]:
            if stop - start >= needed:
                allocated = PoolRange(start if end == LOW else stop - needed, needed, owner, end)
                self._ranges.append(allocated)
                self._ranges.sort(key=lambda each: each.offset)
                return allocated
        return None

    def clear(self, owner: str) -> int:
        """Release every range of ``owner``; their bytes."""
        released = self.held(owner)
        self._ranges = [each for each in self._ranges if each.owner != owner]
        return released

    def pack(self, owner: str) -> list[Move]:
        """Allocate the ranges of ``owner`` anew, each as near to its end as possible; the bytes to move.

        In this order no move overwrites what a later one reads.
        """
        before = [each for each in self._ranges if each.owner == owner]
        TwoEndedPool.clear(self, owner)
        moves: list[Move] = []
        for old in [r for r in before if r.end == LOW] + [r for r in before[::-1] if r.end == HIGH]:
            new = self.put(owner, old.size, old.end)
            assert new is not None  # its old range is free
            if new.offset != old.offset:
                moves.append(Move(old.offset, new.offset, old.size))
        return moves

    def holes(self) -> list[tuple[int, int]]:
        """The free parts, each as its first byte and the first one behind it, by offset."""
        holes, at = [], 0
        for each in self._ranges:
            if each.offset > at:
                holes.append((at, each.offset))
            at = each.stop
        last = self.capacity - self.capacity % ALIGNMENT
        return [*holes, (at, last)] if last > at else holes

    def held(self, owner: str) -> int:
        """Bytes of ``owner``."""
        return sum(each.size for each in self._ranges if each.owner == owner)

    @property
    def free(self) -> int:
        """Bytes of no owner."""
        return sum(stop - start for start, stop in self.holes())

    @property
    def ranges(self) -> tuple[PoolRange, ...]:
        """All ranges, by offset."""
        return tuple(self._ranges)
