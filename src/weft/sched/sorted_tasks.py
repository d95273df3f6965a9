"""A list of tasks kept in order while tasks come and go."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

Key = tuple[float, ...]


class SortedTasks:
    """Task ids by key, then by their position in the queue. Adding and removing search by bisection."""

    def __init__(self) -> None:
        self._rows: list[tuple[Key, int, str]] = []

    def add(self, key: Key, position: int, task: str) -> None:
        """Insert a task."""
        insort(self._rows, (key, position, task))

    def remove(self, key: Key, position: int, task: str) -> None:
        """Take a task out; it must be there under the same key and position."""
        place = bisect_left(self._rows, (key, position, task))
        del self._rows[place]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> str:
        return self._rows[place][2]

    def __iter__(self) -> Iterator[str]:
        return (row[2] for row in self._rows)

    def __reversed__(self) -> Iterator[str]:
        return (row[2] for row in reversed(self._rows))
