"""RunningReport: keep ``report.html`` up to date while a run trains, without slowing it down."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from weft.core.errors import WeftError
from weft.engine.results.result import Result

EVERY_SECONDS = 10.0
SHARE = 0.02  # of the time that writing the page may take

Write = Callable[[list[Result]], None]


class RunningReport:
    """Calls ``write`` with the members as they stand, every so often; the longer a page takes, the more rarely."""

    def __init__(self, write: Write) -> None:
        self._write, self._next = write, 0.0

    def __call__(self, standing: Callable[[], list[Result]], force: bool = False) -> None:
        """Write the page if it is time to, or in any case; a page that cannot be written is left out."""
        begin = time.monotonic()
        if begin < self._next and not force:
            return
        with suppress(OSError, WeftError):
            self._write(standing())
        end = time.monotonic()
        self._next = end + max(EVERY_SECONDS, (end - begin) / SHARE)
