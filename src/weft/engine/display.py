"""Show a run from its Events: plain lines, a notebook, or a live table, which is imported only if it is shown."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from html import escape
from typing import Any, TextIO

from weft.core.errors import SpecError
from weft.core.event import STEERED, Event
from weft.core.units import show_loss

EVERY_SECONDS = 5.0  # between two lines of progress, at first
STEADY_SECONDS = 100.0  # of a run, after which lines of progress become rarer
MOST_ENDS = 40  # members of a sweep whose ends are a line each; of more, those that went wrong
BRIEF = ("note", "end", "finish", "interrupted", *STEERED)
NOTEBOOK_SECONDS = 0.5
MOST_LINES = 6
CHOICES = (True, False, "auto", "live", "plain")


def graph_words(graph: Mapping[str, Any]) -> str:
    """Name and size of a graph."""
    return f"{graph['name']} ({graph['nodes']:,} nodes, {graph['edges']:,} edges)"


def progress_words(data: Mapping[str, Any], metric: str, best: str = "best {:.4f} @ {}") -> list[str]:
    """Loss, validation metric and its best of one training's progress, as far as they are known."""
    value, best_value = data.get(f"val_{metric}"), data.get(f"best_val_{metric}")
    words = [f"loss {show_loss(data['loss'])}"] if "loss" in data else []
    words += [f"val {value:.4f}"] if value is not None else []
    return words + ([best.format(best_value, data["best_epoch"])] if best_value is not None else [])


def outcome_words(event: Event) -> str:
    """How a run ended: its scores, or the best settings of a sweep on every graph, and where the report is."""
    data, metrics = event.data, event.data.get("metrics", {})
    words = [f"{event.task}: {data['status']}"]
    if "statuses" in data:
        words[0] += f" ({', '.join(f'{count} {status}' for status, count in data['statuses'].items())})"
        graphs = data.get("graphs") or {"": data}
        best = {f" on {name}" if name else "": part.get("best_settings") for name, part in graphs.items()}
        words += [f"best settings{where} {settings}" for where, settings in best.items() if settings]
    elif (metric := metrics.get("metric")) and metrics.get("best_epoch"):
        scores = {split: metrics.get(f"{split}_{metric}") for split in ("val", "test")}
        shown = ", ".join(f"{split} {metric} {score:.4f}" for split, score in scores.items() if score is not None)
        words += [f"{shown} at epoch {metrics['best_epoch']}"] if shown else []
    seconds = data.get("seconds", metrics.get("seconds"))
    words += [f"{seconds:.1f} s"] if seconds is not None else []
    return "; ".join(words + ([f"report: {data['report']}"] if "report" in data else []))


class PlainLog:
    """Writes a run as plain lines to ``file`` (stderr by default), each with the seconds since the run began.

    For logs: no colours, no cursor, few lines of progress. ``brief``: notes, what went wrong, and the outcome alone.
    """

    def __init__(self, file: TextIO | None = None, every: float = EVERY_SECONDS, brief: bool = False) -> None:
        self._file, self._every, self._brief = file, every, brief
        self._begin, self._last_progress, self._metric = time.monotonic(), -math.inf, ""
        self._most_ends = 0 if brief else MOST_ENDS
        self._count = 1

    def __enter__(self) -> PlainLog:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, event: Event) -> None:
        """Write the line of an event, if it has one."""
        words = "" if self._brief and event.kind not in BRIEF else self._words(event)
        if words:
            print(f"{time.monotonic() - self._begin:9.1f} s  {words}", file=self._file or sys.stderr, flush=True)

    def _words(self, event: Event) -> str:
        data, kind = event.data, event.kind
        if kind in ("preparing", "note"):
            return str(data["message"])
        if kind in STEERED or kind == "interrupted":
            return f"{kind} after epoch {data['epoch']}"
        if kind == "start":
            self._metric, self._count = data["metric"], data.get("tasks", 1)
            count = f"{data['tasks']} tasks" if "tasks" in data else f"{data['parameters']:,} parameters"
            return f"{event.task}: {count} on {graph_words(data['graph'])}, {data['device']}"
        if kind == "group":
            count = f"{data['rows']} rows" if "rows" in data else f"{len(data['members'])} tasks"
            return f"group {data['group']} of {data['groups']}: {count}, {data['plan']['join']}"
        if kind == "end":
            metrics, message = data["metrics"], data.get("message")
            if self._count > self._most_ends and not message:
                return ""
            score = metrics.get(f"val_{metrics.get('metric', self._metric)}")
            best = "" if score is None else f", best val {score:.4f} @ {metrics['best_epoch']}"
            why = f": {message}" if message and self._brief else ""  # else the summary has it
            return f"{event.task}: {data['status']} after epoch {metrics['epochs_run']}{best}{why}"
        if kind == "finish":
            return outcome_words(event)  # nothing for "failed": the error that follows says it
        now = time.monotonic()
        every = self._every * max(1.0, (now - self._begin) / STEADY_SECONDS)
        if kind != "progress" or now - self._last_progress < every:
            return ""
        self._last_progress = now
        if "members" in data:
            done = f"{data['done']:,} of {data['total']:,} task epochs"
            return f"{done}, {data['epochs_per_second']:,.0f} per second, {len(data['members'])} running"
        return " ".join([f"epoch {data['epoch']}/{data['epochs']}", *progress_words(data, self._metric)])


def in_notebook() -> bool:
    """True if this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


class NotebookDisplay(PlainLog):
    """Shows a run in a notebook: the last lines of a plain log and a progress bar, updated in one output."""

    def __init__(self) -> None:
        super().__init__(every=0.0)  # drawing is rarer, and shows the newest epoch
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
        words, data = self._words(event), event.data
        if event.kind == "progress":
            done, total = (data["done"], data["total"]) if "done" in data else (data["epoch"], data["epochs"])
            self._share = done / max(total or 1, 1)
            self._now = words or self._now
        elif event.kind == "preparing":
            self._now = words
        elif words:
            self._lines = [*self._lines, words][-MOST_LINES:]
        self._draw(force=event.kind not in ("rows", "progress"))

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


def display_for(progress: bool | str, several: bool = False) -> AbstractContextManager[Any] | None:
    """What ``progress`` selects: a live line, or a table for ``several`` tasks (True, ``"live"``), plain lines of text
    (``"plain"``), nothing (False); ``"auto"``: live on a terminal and in a notebook, else notes and the outcome.
    """
    if progress not in CHOICES:
        raise SpecError(f"progress={progress!r} must be True, False, 'auto', 'live' or 'plain'")
    if progress == "plain":
        return PlainLog()
    if progress is not False and in_notebook():
        return NotebookDisplay()
    on_terminal = hasattr(sys.stderr, "isatty") and sys.stderr.isatty()
    if progress is False:
        return None
    if progress == "auto" and not on_terminal:
        return PlainLog(brief=True)
    from rich.console import Console  # a run that is shown nowhere imports no display

    from weft.engine.live_table import LiveDisplay, LiveTable

    return (LiveTable if several else LiveDisplay)(Console(stderr=True))
