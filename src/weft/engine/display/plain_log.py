"""Tell a run as plain lines of text, for logs, from Events alone: no colours, no cursor, few lines of progress."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from weft.core.event import STEERED, Event
from weft.core.units import show_loss

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
