"""A model of torch's caching allocator on a GPU: bytes allocated and bytes reserved.

Requests are rounded to 512 bytes. Those of up to 1 MiB are served from segments of 2 MiB, those of up to 10 MiB from
segments of 20 MiB, larger ones from a segment of their own, rounded to 2 MiB. A request takes the smallest free block
that is large enough; what is left of it becomes a free block again, unless it is too small to be worth it. Freed
neighbours in one segment are joined. Nothing is given back to the device but by :meth:`Allocator.trim`.
"""

from __future__ import annotations

from bisect import bisect_left, insort

UNIT = 512
SMALL = 1 << 20  # largest request of the small pool
SMALL_SEGMENT = 2 << 20
MEDIUM = 10 << 20  # requests from here on have a segment of their own
LARGE_SEGMENT = 20 << 20
SEGMENT_UNIT = 2 << 20


def rounded(size: int) -> int:
    """A request in whole units."""
    return max(UNIT, -(-size // UNIT) * UNIT)


def segment_size(size: int) -> int:
    """Bytes requested from the device for a rounded request."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < MEDIUM:
        return LARGE_SEGMENT
    return -(-size // SEGMENT_UNIT) * SEGMENT_UNIT


class Block:
    """A piece of a segment, with its neighbours there."""

    __slots__ = ("after", "before", "free", "place", "size", "small")

    def __init__(self, place: int, size: int, small: bool) -> None:
        self.place, self.size, self.small = place, size, small
        self.free = True
        self.before: Block | None = None
        self.after: Block | None = None


class Allocator:
    """One pool of blocks. ``allocated`` and ``reserved`` are the bytes now, ``peak`` and ``most`` the most so far.

    ``idle``: bytes of segments with nothing in them, which the device gets back when it runs short.
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = self.peak = self.most = self.idle = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (size, place), ascending
        self._blocks: dict[int, Block] = {}
        self._end = 0

    def allocate(self, size: int) -> Block | None:
        """A block for ``size`` bytes; None for none, which takes nothing."""
        if size <= 0:
            return None
        size = rounded(size)
        small = size <= SMALL
        block = self._best_fit(size, small) or self._segment(size, small)
        self._split(block, size)
        block.free = False
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        return block

    def free(self, block: Block | None) -> None:
        """Free a block, and join it with free neighbours."""
        if block is None:
            return
        self.allocated -= block.size
        block.free = True
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._remove(other)
                block = self._join(block, other)
        insort(self._free[block.small], (block.size, block.place))
        self.idle += block.size if self._is_segment(block) else 0

    def trim(self) -> None:
        """Give segments that are free as a whole back to the device: what ``torch.cuda.empty_cache`` does."""
        for free in self._free.values():
            whole = [entry for entry in free if self._is_segment(self._blocks[entry[1]])]
            for size, place in whole:
                self.reserved -= size
                self.idle -= size
                free.remove((size, place))
                del self._blocks[place]

    def _is_segment(self, block: Block) -> bool:
        return block.before is None and block.after is None

    def _best_fit(self, size: int, small: bool) -> Block | None:
        free = self._free[small]
        at = bisect_left(free, (size, -1))
        if at == len(free):
            return None
        block = self._blocks[free.pop(at)[1]]
        self.idle -= block.size if self._is_segment(block) else 0
        return block

    def _segment(self, size: int, small: bool) -> Block:
        whole = segment_size(size)
        block = Block(self._end, whole, small)
        self._blocks[block.place] = block
        self._end += whole + 1  # segments never touch
        self.reserved += whole
        self.most = max(self.most, self.reserved)
        return block

    def _split(self, block: Block, size: int) -> None:
        left = block.size - size
        if left < UNIT if block.small else left <= SMALL:
            return
        rest = Block(block.place + size, left, block.small)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._blocks[rest.place] = rest
        insort(self._free[rest.small], (rest.size, rest.place))

    def _join(self, one: Block, other: Block) -> Block:
        first, second = (one, other) if one.place < other.place else (other, one)
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        first.free = True
        del self._blocks[second.place]
        return first

    def _remove(self, block: Block) -> None:
        free = self._free[block.small]
        del free[bisect_left(free, (block.size, block.place))]
