"""Choose how a run is shown; what is shown nowhere imports no display."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from weft.core.errors import SpecError

if TYPE_CHECKING:
    from weft.engine.display.live_table import LiveTable
    from weft.engine.display.progress_bar import LiveDisplay


def display_for(progress: bool | str, several: bool = False) -> LiveDisplay | LiveTable | None:
    """What ``progress`` (True, False or ``"auto"``: only on a terminal) selects; a table for ``several`` tasks."""
    if progress not in (True, False, "auto"):
        raise SpecError(f"progress={progress!r} must be True, False or 'auto'")
    if progress is False or (progress == "auto" and not (hasattr(sys.stderr, "isatty") and sys.stderr.isatty())):
        return None
    from rich.console import Console

    console = Console(stderr=True)
    if several:
        from weft.engine.display.live_table import LiveTable

        return LiveTable(console)
    from weft.engine.display.progress_bar import LiveDisplay

    return LiveDisplay(console)
