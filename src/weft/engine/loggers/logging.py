"""Logger to Python's ``logging``: ``logging`` or ``logging:NAME``."""

from __future__ import annotations

import logging
from collections.abc import Callable

from weft.core.event import Event
from weft.engine.loggers.tracker import measured, rows_of

LEVELS = {"failed": logging.ERROR, "note": logging.WARNING, "interrupted": logging.WARNING}
SHOWN = ("start", "log", "end", "finish", "preempted", *LEVELS)


def records_to(name: str) -> Callable[[Event], None]:
    """Log to the logger ``name``: a record per epoch of every member, and per event with a message or an outcome.

    Records have the event as ``weft``.
    """
    logger = logging.getLogger(name or "weft")

    def log(event: Event) -> None:
        data, level = event.data, LEVELS.get(event.kind, logging.INFO)
        if event.kind == "rows" and logger.isEnabledFor(level):
            for part in data["members"]:
                for epoch, values in rows_of(part):
                    logger.log(level, "%s: epoch %d: %s", part["task"], epoch, words(values), extra={"weft": event})
        elif event.kind in SHOWN:
            said = [data.get("status", event.kind), data.get("message", "")]
            said += [words(measured(data.get(key, {}))) for key in ("metrics", "values")]
            logger.log(level, "%s: %s", event.task, "; ".join(filter(None, said)), extra={"weft": event})

    return log


def words(values: dict[str, float]) -> str:
    """Numbers with their names."""
    return ", ".join(f"{name} {value:.6g}" for name, value in values.items())
