"""What pages of reports share: looks, light and dark, and plain elements. Every value is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

STYLE = """
:root { --ink: #1d2433; --soft: #667085; --line: #e4e7ec; --page: #fbfbfa; --card: #fff;
        --train: #8a94a6; --val: #2f6fde; --test: #d9822b; --best: #2e9d6a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --soft: #98a2b3; --line: #2b3242; --page: #12151c; --card: #191e28;
          --train: #7d879a; --val: #6ea0ff; --test: #f0a860; --best: #5fd39b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 40px 24px; background: var(--page); color: var(--ink);
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 26px; margin: 0; }
h2 { font-size: 15px; margin: 0 0 10px; color: var(--soft); font-weight: 600; }
p { margin: 4px 0 24px; color: var(--soft); }
.row { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(330px, 100%), 1fr)); gap: 16px;
       margin-bottom: 16px; align-items: start; }
.row.short { grid-template-columns: repeat(auto-fit, minmax(100px, 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px; }
.big { font-size: clamp(20px, 5vw, 32px); font-weight: 650; line-height: 1.2; } .small { color: var(--soft); }
figure { margin: 0; } figcaption { font-weight: 600; color: var(--soft); margin-bottom: 6px; }
.legend { float: right; font-weight: 400; font-size: 13px; } .legend span { margin-left: 14px; }
.legend span::before { content: "\\2501\\00a0"; }
.legend .best::before { content: "\\2506\\00a0"; color: var(--best); }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 11px; }
svg .grid { stroke: var(--line); } svg .best { stroke: var(--best); stroke-dasharray: 4 3; }
polyline { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
polyline.train { stroke: var(--train); } polyline.val { stroke: var(--val); }
polyline.test { stroke: var(--test); }
span.train::before { color: var(--train); } span.val::before { color: var(--val); }
span.test::before { color: var(--test); }
table { border-collapse: collapse; width: 100%; } td { padding: 3px 0; border-top: 1px solid var(--line); }
tr:first-child td { border-top: 0; } td:last-child { text-align: right; font-variant-numeric: tabular-nums; }
h1, td:last-child { overflow-wrap: anywhere; }
ul { margin: 0; padding-left: 18px; } li { margin-bottom: 4px; }
details { margin-top: 10px; } summary { color: var(--soft); cursor: pointer; margin-bottom: 6px; }
"""


def head(title: str, style: str = "") -> str:
    """The page up to its body, which is left open; nothing in it is fetched from elsewhere."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<style>{STYLE}{style}</style></head><body>"""


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
