"""Handle Ctrl-C and SIGTERM: finish the epochs under way, save, then leave. A second Ctrl-C leaves at once."""

from __future__ import annotations

import signal
import threading
import time
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any

from weft.engine.base.control import Control

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


class Interruption:
    """Hands the first SIGINT or SIGTERM to ``control`` instead of dying of it, for as long as the context lasts.

    Signals reach the main thread only; in any other thread this does nothing, and the control is the way to end a run.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._before: dict[int, Any] = {}
        self._first = -inf

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self._control.signal is None:
            self._first = now
            self._control.interrupt(number)
        elif now - self._first > TWICE:
            raise KeyboardInterrupt
