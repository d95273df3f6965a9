"""Cancel: a handle to end members of a run from outside, from another thread or from a listener."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class Cancel:
    """Call it to end members of a run at the next look: ``cancel("lr=0.5")``; without a name, all of them.

    Hand it to ``weft.run(..., cancel=cancel)``. Ended members keep their history and best weights, with the status
    ``"cancelled"``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: set[str] = set()
        self._all = False

    def __call__(self, *names: str) -> None:
        """Ask for the end of the members called ``names``, or of all."""
        with self._lock:
            self._names |= set(names)
            self._all = self._all or not names

    def wanted(self, names: Iterable[str]) -> set[str]:
        """Those of ``names`` that were asked to end."""
        with self._lock:
            return {name for name in names if self._all or name in self._names}
