"""Channel: a bounded queue between two stages that can be closed from anywhere.

Unlike ``queue.Queue``, closing wakes all waiting threads at once, so shutting a pipeline down needs no timeouts.
"""

from __future__ import annotations

from collections import deque
from threading import Condition
from typing import Any


class Closed(Exception):
    """The channel was closed, and for a reader it is also empty."""


class Channel:
    """At most ``depth`` items; ``longest`` is the most it ever held."""

    def __init__(self, depth: int) -> None:
        self.depth, self.longest = depth, 0
        self._items: deque[Any] = deque()
        self._changed = Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Any) -> None:
        """Add an item, waiting while the channel is full; raises Closed once it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self.depth)
            if self._closed:
                raise Closed
            self._items.append(item)
            self.longest = max(self.longest, len(self._items))
            self._changed.notify_all()

    def take(self) -> Any:
        """The oldest item, waiting while there is none; raises Closed when no more can come."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._items)
            if not self._items:
                raise Closed
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def wait_below(self, length: int) -> None:
        """Wait until fewer than ``length`` items are queued; raises Closed once the channel is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < length)
            if self._closed:
                raise Closed

    def close(self, drop: bool = False) -> None:
        """No more items; ``drop`` also discards those that are queued."""
        with self._changed:
            self._closed = True
            if drop:
                self._items.clear()
            self._changed.notify_all()
