"""Choose how a run is shown; what is shown nowhere imports no display."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from html import escape
from typing import Any, TextIO

from weft.core.errors import SpecError
from weft.core.event import STEERED, Event
from weft.core.units import show_loss

# ---- Tell a run as plain lines of text, for logs, from Events alone: no colours, no cursor, few lines of progress.

EVERY_SECONDS = 5.0  # between two lines of progress


class PlainLog:
    """Writes lines to ``file`` (stderr unless given), each with the seconds since the run began."""

    def __init__(self, file: TextIO | None = None, every: float = EVERY_SECONDS) -> None:
        self._file, self._every = file, every
        self._begin, self._told, self._metric = time.monotonic(), -every, ""

    def __enter__(self) -> PlainLog:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, event: Event) -> None:
        """Take in one event."""
        said = self._words(event)
        if said:
            line = f"{time.monotonic() - self._begin:9.1f} s  {said}"
            print(line, file=self._file or sys.stderr, flush=True)

    def _words(self, event: Event) -> str:
        data = event.data
        if event.kind in ("preparing", "note"):
            return str(data["message"])
        if event.kind in STEERED or event.kind == "interrupted":
            return f"{event.kind} after epoch {data['epoch']}"
        if event.kind == "progress":
            return self._progress(data)
        told = {"start": self._start, "group": self._group, "end": self._end}.get(event.kind)
        if told is not None:
            return told(event)
        return self._over(event) if event.kind in ("finish", "failed") else ""

    def _start(self, event: Event) -> str:
        data, graph = event.data, event.data["graph"]
        self._metric = data["metric"]
        size = f"{graph['nodes']:,} nodes, {graph['edges']:,} edges"
        count = f"{data['tasks']} tasks" if "tasks" in data else f"{data['parameters']:,} parameters"
        return f"{event.task}: {count} on {graph['name']} ({size}), {data['device']}"

    def _group(self, event: Event) -> str:
        data = event.data
        return f"group {data['group']} of {data['groups']}: {len(data['members'])} tasks, {data['plan']['join']}"

    def _end(self, event: Event) -> str:
        metrics = event.data["metrics"]
        score = metrics.get(f"val_{metrics.get('metric', self._metric)}")
        best = "" if score is None else f", best val {score:.4f} @ {metrics['best_epoch']}"
        return f"{event.task}: {event.data['status']} after epoch {metrics['epochs_run']}{best}"

    def _over(self, event: Event) -> str:
        data = event.data
        words = [f"{event.task}: {data.get('status', event.kind)}"]
        words += [str(data["message"])] if "message" in data else []
        words += [f"best {data['best']}"] if data.get("best") else []
        return ", ".join(words)

    def _progress(self, data: Any) -> str:
        now = time.monotonic()
        if now - self._told < self._every:
            return ""
        self._told = now
        if "members" in data:
            done = f"{data['done']:,} of {data['total']:,} task epochs"
            return f"{done}, {data['epochs_per_second']:,.0f} per second, {len(data['members'])} running"
        return " ".join([f"epoch {data['epoch']}/{data['epochs']}", *self._numbers(data)])

    def _numbers(self, data: Any) -> list[str]:
        value, best = data.get(f"val_{self._metric}"), data.get(f"best_val_{self._metric}")
        found = [f"loss {show_loss(data['loss'])}"] if "loss" in data else []
        found += [f"val {value:.4f}"] if value is not None else []
        return found + ([f"best {best:.4f} @ {data['best_epoch']}"] if best is not None else [])


# ---- Show a run in a notebook: one cell output that is updated in place, from Events alone.

NOTEBOOK_SECONDS = 0.5
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
        if self._handle is None or (not force and now - self._drawn < NOTEBOOK_SECONDS):
            return
        from IPython.display import HTML

        self._drawn = now
        self._handle.update(HTML(self.html()))


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
        from weft.engine.live_table import LiveTable

        return LiveTable(console)
    from weft.engine.live_table import LiveDisplay

    return LiveDisplay(console)
