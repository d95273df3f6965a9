"""Line charts as inline SVG: no scripts, no files beside the page."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 14, 30
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
    scale = _Scale(max(epochs, 2), ticks[0], ticks[-1])
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">']
    parts += [_tick(scale, tick) for tick in ticks]
    parts += [_epoch(scale, epoch) for epoch in sorted({1, max(epochs // 2, 1), epochs})]
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - BOTTOM - 6}" text-anchor="end">epoch</text>')
    if marked:
        x = scale.x(marked)
        parts.append(f'<line class="best" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}"/>')
    parts += [_line(scale, curve) for curve in curves]
    entries = [(curve.style, curve.name) for curve in curves] + ([("best", "best epoch")] if marked else [])
    legend = "".join(f'<span class="{style}">{html.escape(name)}</span>' for style, name in entries)
    caption = f'<figcaption>{html.escape(title)}<span class="legend">{legend}</span></figcaption>'
    return "\n".join(["<figure>", caption, *parts, "</svg></figure>"])


def nice_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers that cover ``[low, high]``: about ``wanted`` steps of 1, 2 or 5 times a power of 10."""
    span = (high - low) or max(abs(high), 1.0)
    raw = span / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * i for i in range(first, max(last, first + 1) + 1)]


@dataclass(frozen=True)
class _Scale:
    epochs: int
    low: float
    high: float

    def x(self, epoch: float) -> float:
        return LEFT + (epoch - 1) / (self.epochs - 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)


def _tick(scale: _Scale, value: float) -> str:
    y = scale.y(value)
    return (
        f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>'
    )


def _epoch(scale: _Scale, epoch: int) -> str:
    return f'<text x="{scale.x(epoch):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{epoch}</text>'


def _line(scale: _Scale, curve: Curve) -> str:
    points = [(i + 1, v) for i, v in enumerate(curve.values) if math.isfinite(v)]
    stride = max(1, math.ceil(len(points) / MOST_POINTS))
    kept = points[::stride]
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    path = " ".join(f"{scale.x(epoch):.1f},{scale.y(value):.1f}" for epoch, value in kept)
    return f'<polyline class="{curve.style}" points="{path}"/>'
