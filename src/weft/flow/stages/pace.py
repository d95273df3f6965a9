"""Pace: when a stage may begin its next item, decided from the length of the queue behind it.

TurboGNN's runtime monitoring: a queue that has grown for several items in a row means that the next stage cannot keep
up, so the stage in front of it is held back until the queue has drained.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise


class Pace:
    """Limits the queue behind a stage to ``high_water`` items, and to half of that after ``patience`` growing items."""

    def __init__(self, high_water: int, patience: int = 5) -> None:
        self.high_water, self.patience = high_water, patience
        self.held_back = 0
        self._seen: deque[int] = deque(maxlen=patience + 1)
        self._slow = False

    def limit(self, length: int) -> int:
        """The stage may begin an item once its queue is shorter than this; ``length`` is the queue's length now."""
        self._seen.append(length)
        seen = list(self._seen)
        growing = len(seen) == self.patience + 1 and all(a < b for a, b in pairwise(seen))
        half = max(self.high_water // 2, 1)
        self._slow = growing or (self._slow and length > half)
        limit = half if self._slow else self.high_water
        self.held_back += length >= limit
        return limit
