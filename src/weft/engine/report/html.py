"""Shared parts of report pages: style, light and dark, and plain elements. Every value is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any


def package_file(name: str) -> str:
    """A style sheet or script of this package, to be written into a page."""
    return (resources.files("weft.engine.report") / name).read_text(encoding="utf-8")


def head(title: str, style: str = "") -> str:
    """The page up to its body, which is left open; nothing in it is fetched from elsewhere."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<style>
{package_file("page.css")}{style}</style></head><body>"""


def text(value: Any) -> str:
    """``value`` as HTML text or attribute."""
    return html.escape(str(value))


def table(values: Mapping[str, Any]) -> str:
    """Two columns: what, and its value."""
    rows = []
    for key, value in values.items():
        shown = f"{value:.6g}" if isinstance(value, float) else value
        rows.append(f"<tr><td>{text(key)}</td><td>{text(shown)}</td></tr>")
    return f"<table>{''.join(rows)}</table>"


def bullets(items: Iterable[Any]) -> str:
    """A list with points."""
    return f"<ul>{''.join(f'<li>{text(item)}</li>' for item in items)}</ul>"
