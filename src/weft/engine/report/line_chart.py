"""Line charts as inline SVG: no scripts, no files beside the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.engine.report.charts import Frame, Scale, nice_ticks, path, thinned
from weft.engine.report.html import text

FRAME = Frame(width=560, height=260, left=52, right=12, top=14, bottom=30)
MOST_POINTS = 400  # more are not visible at this width


@dataclass(frozen=True)
class Curve:
    """A named line: ``values[i]`` at epoch ``i + 1``, NaN where unknown; ``style`` is a CSS class."""

    name: str
    values: Sequence[float]
    style: str


def chart(title: str, curves: Sequence[Curve], marked: int | None = None) -> str:
    """An SVG chart of ``curves`` over epochs, with a vertical line at epoch ``marked``."""
    known = [v for curve in curves for v in curve.values if math.isfinite(v)]
    if not known:
        return ""
    epochs = max(len(curve.values) for curve in curves)
    ticks = nice_ticks(min(known), max(known))
    to_x, to_y = FRAME.across(1, max(epochs, 2)), FRAME.up(ticks[0], ticks[-1])
    parts = [FRAME.grid(ticks, to_y)]
    parts += [FRAME.word(to_x(at), FRAME.height - 8, at) for at in sorted({1, max(epochs // 2, 1), epochs})]
    parts.append(FRAME.word(FRAME.end, FRAME.floor - 6, "epoch", "end"))
    if marked:
        parts.append(FRAME.mark(to_x(marked), "best"))
    parts += [_line(curve, to_x, to_y) for curve in curves]
    entries = [(curve.style, curve.name) for curve in curves] + ([("best", "best epoch")] if marked else [])
    legend = "".join(f'<span class="{style}">{text(name)}</span>' for style, name in entries)
    caption = f'<figcaption>{text(title)}<span class="legend">{legend}</span></figcaption>'
    return "\n".join(["<figure>", caption, FRAME.svg(title, parts) + "</figure>"])


def _line(curve: Curve, to_x: Scale, to_y: Scale) -> str:
    points = [(epoch, value) for epoch, value in enumerate(curve.values, 1) if math.isfinite(value)]
    return f'<polyline class="{curve.style}" points="{path(thinned(points, MOST_POINTS), to_x, to_y)}"/>'
