"""Times as people write and read them: deadlines, and the times in a log."""

from __future__ import annotations

import re
import time
from datetime import datetime, timedelta
from typing import Any

from weft.core.errors import SpecError

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
SPAN = re.compile(r"(\d{1,12}(?:\.\d+)?)\s*([smhd])")
CLOCK = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?")
SECONDS = re.compile(r"\d{1,12}(?:\.\d+)?")
STAMP = re.compile(r"^(\d{9,11}\.\d) (?=(?:note|queued|planned|running|paused|done|failed|cancelled)\b)", re.MULTILINE)


def parse_deadline(text: str, now: float | None = None) -> float:
    """``2h`` from now, the next ``18:30``, ``2026-11-18T08:00`` here, or seconds since 1970; as the last."""
    now = time.time() if now is None else now
    try:
        found = _moment(text.strip(), now)
    except (ValueError, OverflowError, OSError):
        expected = "2h from now (s, m, h, d), 18:30, 2026-11-18T08:00, or seconds since 1970"
        raise SpecError(f"--deadline {text}: expected a time: {expected}") from None
    if found <= now:
        hint = f"; for seconds from now write {text.strip()}s" if SECONDS.fullmatch(text.strip()) else ""
        raise SpecError(f"--deadline {text}: {local_time(found, now)} has passed already{hint}")
    return found


def local_time(moment: float, now: float | None = None) -> str:
    """The time of day here, with the date unless that is today's."""
    here, today = datetime.fromtimestamp(moment), datetime.fromtimestamp(time.time() if now is None else now)
    return f"{here:%H:%M:%S}" if here.date() == today.date() else f"{here:%Y-%m-%d %H:%M:%S}"


def with_local_times(log: str) -> str:
    """A log of a task, whose notes begin with seconds since 1970, with local times in their place."""
    return STAMP.sub(lambda found: f"{local_time(float(found[1]))} ", log)


def with_lateness(task: dict[str, Any]) -> dict[str, Any]:
    """A task as the server shows it and, where it has a deadline, whether it was not done by then."""
    deadline = task.get("deadline")
    if not isinstance(deadline, (int, float)) or "late" in task:
        return task
    end = task["updated"] if task["state"] == "done" else time.time()
    return {**task, "late": end > deadline}


def _moment(text: str, now: float) -> float:
    if span := SPAN.fullmatch(text):
        return now + float(span[1]) * UNITS[span[2]]
    if SECONDS.fullmatch(text):
        return float(text)
    if CLOCK.fullmatch(text):
        here = datetime.fromtimestamp(now)
        clock = datetime.strptime(text, "%H:%M:%S" if text.count(":") > 1 else "%H:%M").time()
        wanted = datetime.combine(here.date(), clock)
        return (wanted if wanted > here else wanted + timedelta(days=1)).timestamp()
    return datetime.fromisoformat(text).timestamp()
