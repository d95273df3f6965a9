"""Predicted and measured time and memory of a group, as a small table for the reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.core.plan import Plan
from weft.core.units import show_bytes, show_seconds
from weft.engine.report.html import text

ROWS = {
    "epoch": ("epoch_seconds", show_seconds),
    "tensors at the peak": ("peak_bytes", show_bytes),
    "held by the allocator": ("reserved_bytes", show_bytes),
    "the whole process": ("process_bytes", show_bytes),
    "rows from the feature cache": ("feature_hit_rate", "{:.1%}".format),
    "lists from the cache": ("list_hit_rate", "{:.1%}".format),
}


def predicted_and_measured(plan: Plan) -> str:
    """A row for everything that is known from one side at least; nothing if there is none."""
    rows = [(words, _shown(plan.cost, *how), _shown(plan.measured, *how)) for words, how in ROWS.items()]
    cells = "".join(
        f"<tr><td>{text(words)}</td><td>{text(predicted or '–')}</td><td>{text(measured or '–')}</td></tr>"
        for words, predicted, measured in rows
        if predicted or measured
    )
    head = "<tr><td></td><td>predicted</td><td>measured</td></tr>"
    return f"<table>{head}{cells}</table>" if cells else ""


def _shown(amounts: Mapping[str, Any], key: str, show: Any) -> str:
    value = amounts.get(key)
    return show(value) if isinstance(value, (int, float)) and value > 0 else ""


def cache_words(plan: Plan) -> str:
    """What caches had, in a sentence; empty without any."""
    found = plan.measured
    parts = [
        f"{found[rate]:.1%} of {found[count]:,.0f} {what}"
        for rate, count, what in (
            ("feature_hit_rate", "rows_read", "feature rows"),
            ("list_hit_rate", "lists_read", "neighbour lists"),
        )
        if rate in found
    ]
    return f"from the cache: {', '.join(parts)}" if parts else ""
