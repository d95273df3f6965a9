"""Cancel: end members of a run from outside."""

from __future__ import annotations

from weft.engine.base.control import Control


class Cancel(Control):
    """A :class:`Control` to be called: ``cancel("lr=0.5")`` ends a member after the epochs under way, ``cancel()`` all.

    Hand it to ``weft.run(..., cancel=cancel)``. Ended members keep their history and best weights, with the status
    ``"cancelled"``.
    """

    def __call__(self, *names: str) -> None:
        """The same as :meth:`Control.cancel`."""
        self.cancel(*names)
