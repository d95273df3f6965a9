"""Control: pause, resume, cancel or preempt a run from outside: another thread, a listener, a signal."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any

from weft.core.decision import Requests
from weft.core.errors import SpecError
from weft.core.wording import did_you_mean
from weft.planner.pruning import Rivals

MOST_NAMED = 8  # members in a message
POLL_SECONDS = 0.05  # while paused: a signal handler must not take the lock, so it cannot wake anybody


class Control:
    """Hand it to ``weft.run(..., control=control)`` and call it from any thread; it acts after the epochs under way.

    A run that is paused stays in memory, with a checkpoint in its folder. One that is preempted saves a checkpoint and
    returns, with the status ``"preempted"`` for every member that was not done; ``resume=True`` continues there.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._requests = Requests()
        self._known: frozenset[str] | None = None
        self.signal: int | None = None  # the signal that interrupted the run
        self.rivals: Rivals | None = None  # of a worker: members of the same sweep that other workers train
        self.resumable = True  # whether the run under way could go on from a checkpoint

    # ---- for callers outside the run -------------------------------------------------------------------

    def pause(self) -> None:
        """Train no further until :meth:`resume`."""
        self._set(pause=True)

    def resume(self) -> None:
        """Go on; also takes back a :meth:`preempt` that has not been acted on, or that ended a former run."""
        self._set(pause=False, preempt=False)

    def preempt(self) -> None:
        """Save a checkpoint and end the run, also while it is paused."""
        self._set(preempt=True)

    def cancel(self, *names: str) -> None:
        """End the members called ``names``, or all of them; :class:`SpecError` for a name that no member has.

        Before a run has begun, names cannot be checked: the run does it when it takes the handle.
        """
        with self._changed:
            _check(names, self._known)
            before = self._requests
            self._set(cancel=before.cancel | set(names), cancel_all=before.cancel_all or not names)

    @property
    def paused(self) -> bool:
        """Whether a pause is requested."""
        return self._requests.pause

    def _set(self, **changes: Any) -> None:
        with self._changed:
            self._requests = replace(self._requests, **changes)
            self._changed.notify_all()

    # ---- for the run ---------------------------------------------------------------------------------

    def expect(self, names: Iterable[str]) -> None:
        """A run of members called ``names`` begins: refuse requests for others."""
        with self._changed:
            self._known, self.signal = frozenset(names), None
            _check(self._requests.cancel, self._known)

    def requests(self) -> Requests:
        """All current requests."""
        return replace(self._requests, interrupt=self.signal is not None)

    def wait_while_paused(self, known: Requests) -> None:
        """Return once the requests differ from ``known``: to resume, to end members, or to leave."""
        with self._changed:
            while self.paused and self.requests() == known:
                self._changed.wait(POLL_SECONDS)


def _check(names: Iterable[str], known: Collection[str] | None) -> None:
    unknown = [] if known is None else [name for name in names if name not in known]
    if unknown and known is not None:
        more = ", ..." if len(known) > MOST_NAMED else ""
        hint = did_you_mean(unknown[0], sorted(known)) or f"they are: {', '.join(sorted(known)[:MOST_NAMED])}{more}"
        raise SpecError(f"cancel({unknown[0]!r}): no member has that name; {hint}")


# ---- Handle Ctrl-C and SIGTERM: finish the epochs under way, save, then leave. A second Ctrl-C leaves at once.

TWICE = 1.0  # seconds in which a second signal is taken for the first: a terminal and a wrapper may both send it


class Interrupted(KeyboardInterrupt):
    """Training was interrupted after ``epoch``; it can continue from ``checkpoint`` unless that is None."""

    def __init__(self, epoch: int, checkpoint: Path | None, number: int = signal.SIGINT) -> None:
        self.epoch, self.checkpoint, self.number = epoch, checkpoint, number
        saved = f"; checkpoint in {checkpoint}" if checkpoint else "; nothing saved (no out folder)"
        super().__init__(f"interrupted after epoch {epoch}{saved}")

    @property
    def exit_code(self) -> int:
        """What a shell expects of a command that a signal ended."""
        return 128 + self.number


@contextmanager
def interruptible(control: Control) -> Iterator[None]:
    """Hand the first SIGINT or SIGTERM to ``control`` instead of dying of it, for as long as the context lasts.

    Signals reach the main thread only; in any other thread this does nothing, and the control is the way to end a run.
    """
    first, before = -inf, {}

    def note(number: int, _: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if control.signal is None:
            first, control.signal = now, number  # without the lock of the control, which this thread may hold
        elif now - first > TWICE:
            raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
