"""The tasks of a queue as a table: whole in a pipe, on a terminal as wide as it is, with an ellipsis where cut."""

from __future__ import annotations

import re
import shutil
import sys
import time
import unicodedata
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from weft.core.errors import SpecError
from weft.core.files import replacing
from weft.core.units import show_bytes, show_seconds

# ---- Text of others on a terminal: what would move the cursor, change colours or the window's title is spelled out.

SPELLED = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")  # control characters, directions of writing, lines within a line
KEPT = "\u200c\u200d"  # joiners, which words of some languages and emoji need


def plain_line(text: str) -> str:
    """``text`` on one line, with escapes such as ``\\x1b`` in place of what a terminal would carry out."""
    return text if text.isascii() and text.isprintable() else "".join(map(_spelled, text))


def plain_text(text: str) -> str:
    """The same, with its lines and tabs; what overwrites a line, as progress bars do, begins another one."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "\n".join("\t".join(plain_line(part) for part in line.split("\t")) for line in lines)


def _spelled(character: str) -> str:
    if character in KEPT or unicodedata.category(character) not in SPELLED:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# ---- Tables

GAP = "  "


def column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """The width of every column: that of its longest cell."""
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = (), gap: str = GAP) -> list[str]:
    """The rows as lines of columns; those in ``right`` (by number) are set to the right."""
    widths = list(enumerate(column_widths(rows)))
    lines = ([c.rjust(w) if i in right else c.ljust(w) for c, (i, w) in zip(row, widths, strict=True)] for row in rows)
    return [gap.join(line).rstrip() for line in lines]


COLUMNS = ("id", "state", "name", "graph", "model", "user", "memory", "time", "score", "why")
LEAST = {"why": 24, "name": 16, "graph": 12, "model": 12, "user": 8}  # to which columns are cut, these first


def task_table(tasks: Sequence[dict[str, Any]], width: int | None = None) -> str:
    """A line per task below the names of the columns, of at most ``width`` characters if that can be."""
    rows = [COLUMNS, *(_row(task) for task in tasks)]
    widths = column_widths(rows)
    over = 0 if width is None else sum(widths) + len(GAP) * (len(widths) - 1) - width
    for name, least in LEAST.items():
        column = COLUMNS.index(name)
        cut = max(min(over, widths[column] - least), 0)
        widths[column] -= cut
        over -= cut
    cut_rows = [[c if len(c) <= w else f"{c[: w - 1]}…" for c, w in zip(row, widths, strict=True)] for row in rows]
    return "\n".join(aligned(cut_rows))


def terminal_width() -> int | None:
    """How wide the terminal is; None where the output goes to something else."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _row(task: dict[str, Any]) -> tuple[str, ...]:
    memory = "" if task["bytes"] is None else show_bytes(task["bytes"])
    seconds = "" if task["seconds"] is None else show_seconds(task["seconds"])
    score = "" if task["score"] is None else f"{task['score']:.4f}"
    cells = (task["task"].get("graph", ""), task["task"].get("model", "gcn"), task["user"], memory, seconds, score)
    why = task["why"] or (task["error"] if task["state"] in ("failed", "queued") else "") or ""
    return tuple(map(plain_line, (task["id"], task["state"], task["name"], *map(str, cells), why)))


# ---- Times as people write and read them: deadlines, and the times in a log.

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
SPAN = re.compile(r"(\d{1,12}(?:\.\d+)?)\s*([smhd])")
CLOCK = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?")
SECONDS = re.compile(r"\d{1,12}(?:\.\d+)?")
STAMP = re.compile(r"^(\d{9,11}\.\d) (?=(?:note|queued|planned|running|paused|done|failed|cancelled)\b)", re.MULTILINE)


def parse_deadline(text: str, now: float | None = None) -> float:
    """``2h`` from now, the next ``18:30``, ``2026-11-18T08:00`` here, or seconds since 1970; as the last."""
    now, text = time.time() if now is None else now, text.strip()
    try:
        if span := SPAN.fullmatch(text):
            due = now + float(span[1]) * UNITS[span[2]]
        elif SECONDS.fullmatch(text):
            due = float(text)
        elif CLOCK.fullmatch(text):
            here = datetime.fromtimestamp(now)
            clock = datetime.strptime(text, "%H:%M:%S" if text.count(":") > 1 else "%H:%M").time()
            today = datetime.combine(here.date(), clock)
            due = (today if today > here else today + timedelta(days=1)).timestamp()
        else:
            due = datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        expected = "2h from now (s, m, h, d), 18:30, 2026-11-18T08:00, or seconds since 1970"
        raise SpecError(f"--deadline {text}: expected a time: {expected}") from None
    if due <= now:
        hint = f"; for seconds from now write {text}s" if SECONDS.fullmatch(text) else ""
        raise SpecError(f"--deadline {text}: {local_time(due, now)} has passed already{hint}")
    return due


def local_time(moment: float, now: float | None = None) -> str:
    """The time of day here, with the date unless that is today's."""
    here, today = datetime.fromtimestamp(moment), datetime.fromtimestamp(time.time() if now is None else now)
    return f"{here:%H:%M:%S}" if here.date() == today.date() else f"{here:%Y-%m-%d %H:%M:%S}"


def with_local_times(log: str) -> str:
    """A log of a task, whose notes begin with seconds since 1970, with local times in their place."""
    return STAMP.sub(lambda found: f"{local_time(float(found[1]))} ", log)


# ---- Write the file of ``--out FILE``.


def check_file(path: Path) -> None:
    """Refuse a file that could not be written, before anything is worked out for it."""
    if path.is_dir():
        raise SpecError(f"--out {path}: is a folder; give a file")


@contextmanager
def writing(path: Path, option: str = "--out") -> Iterator[Path]:
    """A path that becomes ``path`` once it is written, with its folders; an error names the ``option``."""
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            yield partial
    except OSError as error:
        raise SpecError(f"{option} {path}: cannot be written ({error.strerror}); choose another place") from None


def write_file(path: Path, text: str, option: str = "--out") -> None:
    """Write ``text`` in one piece."""
    with writing(path, option) as partial:
        partial.write_text(text, encoding="utf-8")


def numbers(text: str | None, name: str) -> Any:
    """The list in ``3,5,8``; what begins with a letter, as the name of a split does, stays as it is."""
    if text is None or text[:1].isalpha():
        return text
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise SpecError(f"--{name} {text}: expected numbers, such as 3,5,8") from None
