"""Show a run in a notebook: one cell output that is updated in place, from Events alone."""

from __future__ import annotations

import sys
import time
from html import escape
from typing import Any

from weft.core.event import Event
from weft.engine.display.plain_log import PlainLog

EVERY_SECONDS = 0.5
MOST_LINES = 6


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


class NotebookDisplay(PlainLog):
    """The last lines of a plain log and a progress bar, in one output."""

    def __init__(self) -> None:
        super().__init__(every=0.0)  # the newest epoch is known when it is drawn, which is rarer
        self._lines: list[str] = []
        self._now, self._share, self._drawn = "", 0.0, 0.0
        self._handle: Any = None

    def __enter__(self) -> NotebookDisplay:
        from IPython.display import HTML, display

        self._handle = display(HTML(self.html()), display_id=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._draw(force=True)

    def __call__(self, event: Event) -> None:
        """Take in one event."""
        said = self._words(event)
        if event.kind == "progress":
            done, total = (
                event.data.get(name) for name in (("done", "total") if "done" in event.data else ("epoch", "epochs"))
            )
            self._share = done / max(total or 1, 1)
            self._now = said or self._now
        elif event.kind == "preparing":
            self._now = said
        elif said:
            self._lines = [*self._lines, said][-MOST_LINES:]
        self._draw(force=event.kind != "progress")

    def html(self) -> str:
        """What is shown now."""
        lines = "".join(f"<div>{escape(line)}</div>" for line in self._lines)
        bar = f'<progress value="{self._share:.3f}" max="1" style="width:20em"></progress> {escape(self._now)}'
        bar = bar if self._now else ""  # nothing yet, or an error before anything
        return f'<div style="font-family:monospace">{lines}<div>{bar}</div></div>'

    def _draw(self, force: bool) -> None:
        now = time.monotonic()
        if self._handle is None or (not force and now - self._drawn < EVERY_SECONDS):
            return
        from IPython.display import HTML

        self._drawn = now
        self._handle.update(HTML(self.html()))
