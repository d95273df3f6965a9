"""Cancel: a handle to end members of a run from outside, from another thread or from a listener."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable

from weft.core.errors import SpecError
from weft.core.suggest import did_you_mean

MOST_NAMED = 8  # members in a message


class Cancel:
    """Call it to end members of a run at the next look: ``cancel("lr=0.5")``; without a name, all of them.

    Hand it to ``weft.run(..., cancel=cancel)``. Ended members keep their history and best weights, with the status
    ``"cancelled"``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: set[str] = set()
        self._all = False
        self._known: frozenset[str] | None = None

    def __call__(self, *names: str) -> None:
        """Ask for the end of the members called ``names``, or of all; :class:`SpecError` for a name nobody has.

        Before a run has begun, names cannot be checked: the run does it when it takes the handle.
        """
        with self._lock:
            _check(names, self._known)
            self._names |= set(names)
            self._all = self._all or not names

    def expect(self, names: Iterable[str]) -> None:
        """A run of members called ``names`` begins: refuse what was asked for and is not among them."""
        with self._lock:
            self._known = frozenset(names)
            _check(self._names, self._known)

    def wanted(self, names: Iterable[str]) -> set[str]:
        """Those of ``names`` that were asked to end."""
        with self._lock:
            return {name for name in names if self._all or name in self._names}


def _check(names: Iterable[str], known: Collection[str] | None) -> None:
    unknown = [name for name in names if known is not None and name not in known]
    if not unknown or known is None:
        return
    more = ", ..." if len(known) > MOST_NAMED else ""
    hint = did_you_mean(unknown[0], sorted(known)) or f"they are: {', '.join(sorted(known)[:MOST_NAMED])}{more}"
    raise SpecError(f"cancel({unknown[0]!r}): no member has that name; {hint}")
