"""Choose how a run is shown; what is shown nowhere imports no display."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

from weft.core.errors import SpecError
from weft.engine.display.notebook import NotebookDisplay, in_notebook
from weft.engine.display.plain_log import PlainLog

CHOICES = (True, False, "auto", "live", "plain")


def display_for(progress: bool | str, several: bool = False) -> AbstractContextManager[Any] | None:
    """What ``progress`` selects: a live line, or a table for ``several`` tasks (True, ``"live"``), plain lines of text
    (``"plain"``), nothing (False); ``"auto"``: live on a terminal and in a notebook, else nothing.
    """
    if progress not in CHOICES:
        raise SpecError(f"progress={progress!r} must be True, False, 'auto', 'live' or 'plain'")
    if progress == "plain":
        return PlainLog()
    if progress is not False and in_notebook():
        return NotebookDisplay()
    on_terminal = hasattr(sys.stderr, "isatty") and sys.stderr.isatty()
    if progress is False or (progress == "auto" and not on_terminal):
        return None
    return _live(several)


def _live(several: bool) -> AbstractContextManager[Any]:
    from rich.console import Console

    console = Console(stderr=True)
    if several:
        from weft.engine.display.live_table import LiveTable

        return LiveTable(console)
    from weft.engine.display.progress_bar import LiveDisplay

    return LiveDisplay(console)
