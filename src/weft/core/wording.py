"""Name an option as the user gave it: ``out=`` in Python, ``--out`` in the shell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import SequenceMatcher

MOST_SHOWN = 80  # characters of a value in a message
_IN_SHELL: ContextVar[bool] = ContextVar("in_shell", default=False)  # not in the threads in which a server answers


@contextmanager
def shell_words() -> Iterator[None]:
    """Messages made inside name options as the shell does; those of other threads, as Python does."""
    token = _IN_SHELL.set(True)
    try:
        yield
    finally:
        _IN_SHELL.reset(token)


def option(name: str, value: object = None) -> str:
    """``out=`` or ``--out``; with a value ``out='runs/a'`` or ``--out runs/a``, ``resume=True`` or ``--resume``.

    A long value is cut. Names in capitals are variables of the environment, written alike in both.
    """
    if _IN_SHELL.get() and not name.isupper():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            return f"--{name}" if value else f"--no-{name}"
        return f"--{name}" if value is None else f"--{name} {_cut(str(value))}"
    return f"{name}=" if value is None else f"{name}={brief(str(value) if hasattr(value, '__fspath__') else value)}"


def brief(value: object) -> str:
    """The ``repr`` of a value in one line, cut if it is long."""
    return _cut(" ".join(map(str.strip, repr(value).split("\n"))))


def _cut(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 1]}…"


def switch(name: str) -> str:
    """``resume=True`` or ``--resume``."""
    return option(name, True)


# ---- Suggest the nearest known name for a misspelt one.

CUTOFF = 0.6  # of difflib's ratio: below it two names have little in common


def closest(name: object, known: Iterable[object], count: int = 1, cutoff: float = CUTOFF) -> list[str]:
    """Up to ``count`` of ``known`` that are close to ``name``, the fewest typing errors away first.

    Letter case does not count; what is not a string is never suggested.
    """
    typed = str(name).lower()
    matches = []
    for place, candidate in enumerate(known):
        if isinstance(candidate, str):
            likeness = SequenceMatcher(None, typed, candidate.lower()).ratio()
            if likeness >= cutoff:
                matches.append((edits(typed, candidate.lower()), -likeness, place, candidate))
    return [match[-1] for match in sorted(matches)[:count]]


def did_you_mean(name: object, known: Iterable[object], count: int = 1, cutoff: float = CUTOFF) -> str:
    """``"did you mean 'a' or 'b'?"``, empty if nothing is close."""
    close = closest(name, known, count, cutoff)
    return "did you mean " + " or ".join(repr(candidate) for candidate in close) + "?" if close else ""


def nearest_names(name: str, known: Iterable[str], count: int = 3) -> str:
    """``" (did you mean 'a' or 'b'?)"`` to append to an error message, empty if nothing is close."""
    hint = did_you_mean(name, known, count)
    return f" ({hint})" if hint else ""


def edits(a: str, b: str) -> int:
    """How many letters to insert, delete, replace or swap with their neighbour make ``b`` of ``a``."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        before, last, row = row, before, [i]
        for j, other in enumerate(b, 1):
            best = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                best = min(best, last[j - 2] + 1)
            row.append(best)
    return row[-1]
