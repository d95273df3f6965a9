"""Suggesting what a misspelt name was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest_names(name: str, known: Iterable[str], count: int = 3) -> str:
    """``"; did you mean 'a' or 'b'?"``-like ending for an error message, empty when nothing is close."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=count, cutoff=0.6)
    if not close:
        return ""
    return " (did you mean " + " or ".join(repr(by_lower[match]) for match in close) + "?)"
